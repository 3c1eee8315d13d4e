"""Three training programs without faults, for `benchmarks/blame.py`."""
