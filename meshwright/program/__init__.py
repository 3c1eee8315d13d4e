"""What the text of a compiled program says: its operations, exchanges and memory.

`hlo_text` parses the text of a program, and `visits` lists what it runs and how often.
`device_groups` knows which devices exchange data. `collectives` and `operations` find what a
program exchanges and computes, `peak_memory` which arrays fill the memory, and `costs` puts it
together.
"""
