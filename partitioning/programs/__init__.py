"""Compiles functions over a mesh. Calls are as fast as with `jax.jit`, and errors name arguments.

`partitioned_function` has the object that `partition` returns, and `contexts` sets the mesh and the
rules while a function is traced. `boundary` checks the arguments of `partition`. `inner_layouts`
applies layouts that jax.jit does not accept, and traces functions over Auto axes if Explicit axes
reject them. `trace_log` counts traces. `explaining` runs only after a failure.
"""
