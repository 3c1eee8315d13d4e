"""Draws meshes, the shards of arrays, and the memory of devices."""
