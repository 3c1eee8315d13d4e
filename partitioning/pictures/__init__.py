"""Pictures of meshes, of the shards of arrays, and of the memory of devices."""

from partitioning.pictures.memory import draw_audit
from partitioning.pictures.mesh_drawing import draw_mesh
from partitioning.pictures.shards import ShardingPicture, visualize_sharding

__all__ = ['ShardingPicture', 'draw_audit', 'draw_mesh', 'visualize_sharding']
