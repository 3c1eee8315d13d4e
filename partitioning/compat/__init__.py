"""Offers the functions and classes of other systems, one package per system.

`torch_xla` has marks and tiles, `pytorch` sharding plans and shards, and `autodist` planners and
their strategies. The rest of `partitioning` never imports this package.
"""
