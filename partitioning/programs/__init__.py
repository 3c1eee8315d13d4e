"""Functions compiled over a mesh: as fast as plain `jax.jit`, and with errors that name arguments.

`partitioned_function` has the object that `partition` returns, and `contexts` sets the mesh and the
rules while a function is traced. What `partition` accepts is checked in `boundary`. `inner_layouts`
applies layouts that jax.jit does not accept, and traces functions over Auto axes if Explicit
axes reject them. `trace_log` counts traces. What runs only after a failure is in `explaining`.
"""
