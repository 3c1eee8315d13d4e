"""Chooses the devices and compiler options of a run, and keeps its compiled programs."""
