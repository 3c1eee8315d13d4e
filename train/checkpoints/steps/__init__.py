"""Saved steps: their files and checksums, which of them are good, and which are kept."""
