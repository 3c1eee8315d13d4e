"""Planners that leave gradients to all-reduces."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from partitioning.compat.autodist.nodes import NodeConfig
from partitioning.compat.autodist.partitioner_config import PartitionerConfig
from partitioning.compat.autodist.planner import (
    AutoDistPlanner,
    all_reduced,
    along,
    check_all_reduce,
    even_rows,
    whole,
)
from partitioning.compat.autodist.splits import even_shards
from partitioning.compat.autodist.variables import Variable, describe_variables
from partitioning.rules import is_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReducePlanner(AutoDistPlanner):
    """A planner that leaves gradients to all-reduces.

    Attributes:
      chunk_size: so many shards in a row share a collective group in the strategy. (XLA combines
        collectives by rules of its own.)
      all_reduce_spec: 'AUTO': XLA chooses the all-reduce.
      compressor: 'NoneCompressor'; see `compress_gradients` for others.
    """

    chunk_size: int = 128
    all_reduce_spec: str = 'AUTO'
    compressor: str = 'NoneCompressor'

    def __post_init__(self) -> None:
        check_all_reduce(self.chunk_size, self.all_reduce_spec, self.compressor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(AllReducePlanner):
    """Every variable whole, its gradient all-reduced; on a mesh, replicated."""

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return all_reduced(variables, whole, self.chunk_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedAR(AllReducePlanner):
    """Every variable cut along dimension 0, each shard all-reduced by itself.

    On a mesh, sharding of the weight update: each device keeps and updates its part of a variable
    and of what the optimizer keeps of it.
    """

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return all_reduced(variables, even_rows, self.chunk_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAxisPartitionAR(AllReducePlanner):
    """As PartitionedAR, each variable cut along a random one of its dimensions larger than 1.

    The dimension depends on the seed and the name of the variable alone, so it is the same in every
    process, and whatever other variables there are. Sparse variables are cut along dimension 0.

    Attributes:
      seed: 0 or more.
      sparse: paths, or regular expressions of whole paths, of variables with sparse gradients,
        where `build` is given parameters; `Variable`s say it themselves.
    """

    seed: int = 0
    sparse: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.seed) and (self.seed != 0 or isinstance(self.seed, bool)):
            raise ValueError(f'seed {self.seed!r} must be a whole number of 0 or more')

    def _describe(self, params: Any) -> tuple[Variable, ...]:
        return describe_variables(params, self.sparse)

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return all_reduced(variables, self._cut, self.chunk_size)

    def _cut(self, variable: Variable) -> PartitionerConfig | None:
        larger = [dim for dim, size in enumerate(variable.shape) if size > 1]
        if not larger or variable.sparse:
            return even_rows(variable) if larger else None
        random = np.random.default_rng([self.seed, zlib.crc32(variable.name.encode())])
        dim = larger[random.integers(len(larger))]
        return along(variable, dim, even_shards(variable.shape[dim]))
