"""Reads the operations, exchanges and memory of a compiled program from its text.

`hlo_text` parses the text of a program, and `visits` lists what it runs and how often.
`collectives` finds the exchanges of a program, `operations` its computation, and `peak_memory` the
arrays that fill the memory. `costs` combines them.
"""
