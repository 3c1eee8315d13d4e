"""Pictures of meshes, of the shards of arrays, and of the memory of devices."""

from partitioning.pictures.memory import (
    draw_audit as draw_audit,
)
from partitioning.pictures.mesh_drawing import (
    draw_mesh as draw_mesh,
)
from partitioning.pictures.shards import (
    ShardingPicture as ShardingPicture,
    visualize_sharding as visualize_sharding,
)
