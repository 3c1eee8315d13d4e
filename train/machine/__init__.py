"""The machine of a run: its devices, compiler options, and cache of compiled programs."""
