"""Finds what is wrong or wasteful in the layouts of a program, before it runs.

`program_facts` reads a traced function once. It finds how each array is laid out if layouts only
travel forward, which results become arguments of the next call, and which arguments are weights or
a batch. The checks use these facts: `array_checks` looks at arguments, `product_checks` at lines of
the function, and `call_checks` at what happens between two calls.
"""
