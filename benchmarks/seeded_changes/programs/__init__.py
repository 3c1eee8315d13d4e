"""The programs: `build()` returns a jitted function and its arguments."""
