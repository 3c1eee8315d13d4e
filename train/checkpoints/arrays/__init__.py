"""Stored arrays: read lazily, piece by piece, and placed on devices."""
