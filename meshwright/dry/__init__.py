"""Runs an untouched script as if a described machine were there.

`machine` has the devices. `stand_in` has the arrays on them, which have no values. `compiling`
compiles what the script calls, and records it. `imitating` answers what the script asks jax about
devices, processes and placement. `stores` sends files that the script or its `libraries` write to a
folder that is removed at the end. `ending` decides when a run ends. `lines` finds the line that is
running, and calls that could not be imitated. `script` runs the script.
"""
