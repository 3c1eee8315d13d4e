"""Multiplies sharded arrays so that gradients are summed and scattered at once.

`dense` has products of rows and weights, and finds the mesh axes that shard both. `sums` has
reduce-scatters inside a shard_map, in rounds that suit the machine. `rounded` multiplies in 8 bits.
"""

from partitioning.products.dense import multiply as multiply
from partitioning.products.rounded import Rounded as Rounded, Rounding as Rounding
from partitioning.products.sums import (
    find_rounds as find_rounds,
    in_rounds as in_rounds,
    scatter_sum as scatter_sum,
    sum_over as sum_over,
)
