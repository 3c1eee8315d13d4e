"""Evaluators: scores of a state on held-out rows, samples of text, and whatever users add."""
