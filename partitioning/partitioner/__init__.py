"""Partitioners turn a mesh and rules into plans and compiled functions. Most users start here.

`base`, `base_pjit`, `pjit` and `moe` are the partitioners. `settings` reads their mesh and layout,
`chosen_rules` has the rules that follow, and `t5x_settings` the arguments of T5X. `objects` has
T5X's names of methods, and their repr, copies and pickles. `initializing` makes states in their
shards, `steps` partitions training steps, and `batches` lays out their batches.
"""
