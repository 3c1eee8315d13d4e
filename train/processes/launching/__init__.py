"""Starts, watches and restarts the processes of a run on this machine, and ends them together.

Nothing here imports jax, so the launcher starts fast and never holds a device.
"""
