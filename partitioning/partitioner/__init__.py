"""Partitioners, where most users start: they turn a mesh and rules into plans and functions.

`base`, `base_pjit`, `pjit` and `moe` are the partitioners. `settings` checks their settings and
defines their repr and copies. `training_setup` creates states in their shards and partitions steps.
"""
