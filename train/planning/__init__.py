"""Forecasts the memory and time of a run on other machines, and finds better settings.

`machines` names machines and moves runs to them, and `forecasts` says what a run does there.
`candidates` and `presets` change the settings of a run, `changes` finds changes with which a run
fits, `fits` the machines into which it fits, and `searching` the settings with which it is fastest.
`gin_text` writes settings for people; all other files change a `TrainConfig` by value.
"""
