"""Finds what is wrong or wasteful in the layouts of a program, before it runs.

`program_facts` reads a traced function once: how its arrays are laid out if layouts only travel
forward, which results are the next call's arguments, and which arguments are weights or a batch.
The checks are functions of these facts: `array_checks` of arguments, `product_checks` of the lines
of the function, and `call_checks` of what happens between two calls.
"""
