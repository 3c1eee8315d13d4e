"""The vocabulary of other systems on Meshwright's core, one package for each system.

`torch_xla`: marks and tiles; `pytorch`: sharding plans and shards; `autodist`: planners and their
strategies. The core never imports this package.
"""
