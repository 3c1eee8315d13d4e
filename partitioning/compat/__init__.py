"""The functions and classes of other systems on Meshwright's core, one package per system.

`torch_xla`: marks and tiles; `pytorch`: sharding plans and shards; `autodist`: planners and their
strategies. The core never imports this package.
"""
