"""Explains why a call or a trace failed, or why a function was compiled again.

It is imported only after a failure, so a program that works does not wait for it. `causes` looks
for the cause of an exception among the arguments, with `misfits`. `trace_errors` translates errors
of jax, flax and optax in a trace, and `changed_arguments` says why a function was compiled again.
"""
