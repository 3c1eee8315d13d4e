"""What a program is by meaning, as a file, and what differs between two of them.

`record` has the file, `recording` makes it of a program, `traced_facts` reads what the code says,
`renamed` finds arguments whose names changed, and `comparing` lists differences. `verdicts` tells
changes of the code from those of versions, and `verdict_text` writes both as lines. `files` has the
golden files.
"""
