"""Reads and writes checkpoints in the format of Orbax."""
