"""Pictures of meshes, of the shards of arrays, and of the memory of devices."""
