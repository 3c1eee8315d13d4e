"""A run from its start to its end: training, evaluation, and the parts of both."""
