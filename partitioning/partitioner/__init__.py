"""Partitioners, where most users start: they turn a mesh and rules into plans and functions.

`base`, `base_pjit`, `pjit` and `moe` are the partitioners. `settings` reads their mesh and layout,
`chosen_rules` has the rules that follow, `t5x_settings` the arguments of T5X, and `objects` their
repr, copies and pickles. `initializing` makes states in their shards, and `steps` partitions steps,
with the layout of `batches`.
"""
