"""Tensors and ways to cut them into shards, for the tests of PyTorch's shards."""

import math

import numpy as np
from hypothesis import strategies as st

from partitioning import create_mesh
from partitioning.compat.pytorch import ChunkShardingSpec, GridShardingSpec, ShardMetadata

MESH = create_mesh((4, 2), ('data', 'model'))
CUBE = create_mesh((2, 2, 2), ('a', 'b', 'c'))


def tensor(shape, dtype='int32'):
    """An array whose elements all differ."""
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def blocks_of(shards, array):
    return [(shard, array[shard.index]) for shard in shards]


def places(shards):
    """The shards as a set of (offsets, sizes)."""
    return {(s.shard_offsets, s.shard_sizes) for s in shards}


@st.composite
def _guillotine(draw, start, stop, depth=4):
    """A box, cut in two along any dimension, whose parts are cut again."""
    dims = [d for d in range(len(start)) if stop[d] - start[d] > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [ShardMetadata(start, [b - a for a, b in zip(start, stop, strict=True)])]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(start[dim] + 1, stop[dim] - 1))
    low, high = [*stop], [*start]
    low[dim] = high[dim] = cut
    return draw(_guillotine(start, low, depth - 1)) + draw(_guillotine(high, stop, depth - 1))


@st.composite
def cuts(draw):
    """A shape and its shards in any order: chunks, a grid, or arbitrary boxes."""
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 8, 16]), min_size=rank, max_size=rank)))
    kind = draw(st.sampled_from(['chunks', 'grid', 'anywhere']))
    if kind == 'chunks':
        spec = ChunkShardingSpec(draw(st.integers(-rank, rank - 1)), range(draw(st.integers(1, 6))))
        shards = [*spec.build_metadata(shape)]
    elif kind == 'grid':
        block = tuple(
            draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape
        )
        number = math.prod(n // b for n, b in zip(shape, block, strict=True))
        shards = [*GridShardingSpec(block, range(number)).build_metadata(shape)]
    else:
        shards = draw(_guillotine([0] * rank, [*shape]))
        if draw(st.booleans()):
            first = draw(st.integers(0, shape[0]))
            shards.append(ShardMetadata([first] + [0] * (rank - 1), [0, *shape[1:]]))
    return shape, draw(st.permutations(shards))
