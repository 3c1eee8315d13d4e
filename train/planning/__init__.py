"""Forecasts the memory and time of a run on other machines, and finds better settings.

`machines` finds machines by name and moves runs to them; `forecasts` says how runs do there.
`candidates` and `presets` change the settings of a run. `changes` finds changes that make a run fit
into a machine, `fits` says whether a run fits, and `searching` finds the fastest settings.
`gin_text` writes settings for people; all other files change a `TrainConfig` by value.
"""
