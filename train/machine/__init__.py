"""The machine of a run: its devices, the options of its compiler, and the cache of its programs."""
