"""What is wrong with a call, a trace or a recompilation, in our own words.

Nothing here is imported before something has failed, so a program that works does not pay for it.
`causes` looks for the cause of an exception among the arguments, with `misfits`. `trace_errors`
translates errors of jax, flax and optax in a trace, and `changed_arguments` says why a function was
compiled again.
"""
