"""Records what a program means, without names and line numbers, in a file, and compares records.

`record` has the file, and `recording` makes it from a program. `traced_facts` reads what the code
says. `renamed` finds arguments whose names changed, and `comparing` lists differences. `verdicts`
tells changes of the code from changes of versions, and `verdict_text` writes both as lines. `files`
has the golden files.
"""
