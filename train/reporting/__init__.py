"""Reports on a run: console output, metrics, speed, and whether the memory suffices."""
