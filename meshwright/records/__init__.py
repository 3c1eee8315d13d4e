"""What a program is by meaning, as a file, and what differs between two of them.

`record` has the file, `recording` makes it of a program, `traced_facts` reads what the code says,
`renamed` finds arguments whose names changed, `comparing` lists differences, and `drawing` shows
them in a terminal and as Markdown.
"""
