"""Keeps the records and checksums of saved steps, finds the good steps, and deletes steps."""
