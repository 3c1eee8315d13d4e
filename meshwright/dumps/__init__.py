"""Reads files that XLA and jax write about programs: folders of `--xla_dump_to`, HLO and StableHLO.

`folder` finds the modules of a folder. `hlo_module` reads the text of HLO, with `buffer_assignment`
for its memory, and `stablehlo` the text of a program that is not compiled. `shardings` and
`mesh_sizes` read layouts and meshes. `reading` puts these together, and `drawing` writes the text.
"""
