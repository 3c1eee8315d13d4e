"""Inspects, compares and converts checkpoints without a run."""
