"""What surrounds the steps of a run: its processes, its phases, its output and its metrics."""
