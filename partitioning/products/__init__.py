"""Products of sharded arrays, and the sums over shards that their gradients need.

`dense`: products of rows and weights, and the mesh axes that both are sharded over; `sums`:
scattered sums inside a shard_map, in rounds that suit the machine.
"""

from partitioning.products.dense import multiply as multiply
from partitioning.products.sums import (
    find_rounds as find_rounds,
    in_rounds as in_rounds,
    scatter_sum as scatter_sum,
    sum_over as sum_over,
)
