"""The processes of a run on this machine: started, watched, restarted, and ended together.

Nothing here imports jax: the launcher starts at once, and never holds a device.
"""
