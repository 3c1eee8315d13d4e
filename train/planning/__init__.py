"""Forecasts the memory and time of a run on other machines, and finds better settings.

`machines` finds machines by name and moves runs to them, and `forecasts` forecasts runs there.
`candidates` and `presets` change the settings of a run. `changes` finds changes that make a run fit
a machine, `fits` says whether a run fits, and `searching` finds the fastest settings. `gin_text`
writes settings as gin. All other files work with a `TrainConfig`.
"""
