"""Evaluators, which score a state on held-out rows, or write its predictions or samples."""
