"""Lets the processes of a run find each other, compare their settings, and end together."""
