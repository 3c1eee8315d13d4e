"""Products of sharded arrays, and the sums over shards that their gradients need."""

from partitioning.products.rounds import find_rounds as find_rounds, in_rounds as in_rounds
from partitioning.products.sums import scatter_sum as scatter_sum
