"""Saved steps: their records and checksums, which steps are good, and how steps are deleted."""
