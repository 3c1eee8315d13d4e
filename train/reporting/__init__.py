"""What a run reports: console output, metrics, speed, and whether its memory suffices."""
