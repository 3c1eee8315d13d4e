"""Golden forecasts: files that say what a program needs and moves, and that tests compare."""
