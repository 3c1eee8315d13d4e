"""Runs an untouched script as if a described machine were there.

`machine` has the devices. `stand_in` has the arrays on them, which have no values. `compiling`
compiles what the script calls, and records it. `imitating` answers what the script asks jax about
devices, processes and placement. `stores` refuses what would be written, also by the libraries in
`libraries`. `ending` decides when a run ends, and `lines` what cannot be imitated. `script` runs
the script.
"""
