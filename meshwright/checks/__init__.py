"""Golden forecasts: files with the memory and exchanges of a program, which tests compare."""
