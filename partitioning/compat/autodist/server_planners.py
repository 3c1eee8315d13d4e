"""Planners that leave variables to parameter servers, and Parallax, which leaves some to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from partitioning.compat.autodist.nodes import NodeConfig
from partitioning.compat.autodist.planner import (
    AutoDistPlanner,
    check_all_reduce,
    even_rows,
    on_servers,
    uneven_rows,
    whole,
)
from partitioning.compat.autodist.variables import Variable, describe_variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerPlanner(AutoDistPlanner):
    """A planner that leaves variables to parameter servers.

    Attributes:
      local_proxy_variable: whether AutoDist would keep copies of variables beside the replicas; the
        strategy says so. On a mesh every device has a copy of what is not split, either way.
      sync: True: a step waits for the gradients of all devices, which is all that one program over
        a mesh can do.
      staleness: 0: no device runs ahead, for the same reason.
    """

    local_proxy_variable: bool = False
    sync: bool = True
    staleness: int = 0

    def __post_init__(self) -> None:
        if not self.sync or self.staleness:
            raise ValueError(
                f'{type(self).__name__}: sync={self.sync!r} with staleness={self.staleness!r} '
                'cannot be had: one program runs on all devices of a mesh, and each of its steps '
                'waits for the gradients of all. Leave them at sync=True and staleness=0.'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PS(ServerPlanner):
    """Every variable whole on the first server; on a mesh, replicated."""

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return on_servers(variables, servers[:1], whole, self.local_proxy_variable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PSLoadBalancing(ServerPlanner):
    """Every variable whole on the server with the fewest bytes so far; on a mesh, replicated."""

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return on_servers(variables, servers, whole, self.local_proxy_variable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedPS(ServerPlanner):
    """Every variable cut along dimension 0, in its smallest number of equal shards, by load.

    On a mesh, split along dimension 0 over all of the axis.
    """

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return on_servers(variables, servers, even_rows, self.local_proxy_variable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenPartitionedPS(ServerPlanner):
    """As PartitionedPS, cut in the smallest number of shards that does not divide dimension 0.

    On a mesh variables are split over all of the axis, as PartitionedPS splits them. jax lays out
    equal shards only; rows that the axis does not divide are split unevenly with
    `plan.resolve(params, mesh, on_indivisible='pad')`, or
    `VariablePartitioner(mesh, on_indivisible='pad')`: whole in the state, and split with a padded
    last shard inside functions partitioned by `PjitPartitioner`.
    """

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        return on_servers(variables, servers, uneven_rows, self.local_proxy_variable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallax(ServerPlanner):
    """Variables with sparse gradients whole on servers, by load; all others all-reduced.

    On a mesh the sparse ones, the tables of embeddings, are split by rows over the axis, and the
    others replicated.

    Attributes:
      chunk_size: so many variables in a row, sparse ones counted, share a collective group.
      all_reduce_spec: 'AUTO': XLA chooses the all-reduce.
      compressor: 'NoneCompressor'; see `compress_gradients` for others.
      sparse: paths, or regular expressions of whole paths, of variables with sparse gradients,
        where `build` is given parameters; `Variable`s say it themselves. By default a
        guess, which is logged: those with a name that has 'embedding' in it.
    """

    chunk_size: int = 128
    all_reduce_spec: str = 'AUTO'
    compressor: str = 'NoneCompressor'
    sparse: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_all_reduce(self.chunk_size, self.all_reduce_spec, self.compressor)

    def _describe(self, params: Any) -> tuple[Variable, ...]:
        if self.sparse is not None:
            return describe_variables(params, self.sparse)
        guessed = tuple(
            dataclasses.replace(variable, sparse='embedding' in variable.name.lower())
            for variable in describe_variables(params)
        )
        logging.info(
            'Parallax takes for sparse, by their names: %s',
            ', '.join(v.name for v in guessed if v.sparse) or 'no variable',
        )
        return guessed

    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        sparse = [variable for variable in variables if variable.sparse]
        # AutoDist keeps no copies of these: they are large, and a replica needs a few rows.
        placed = on_servers(sparse, servers, whole, local_replication=False)
        for index, variable in enumerate(variables):
            if variable.sparse:
                yield next(placed)
            else:
                groups = (index // self.chunk_size,)
                yield NodeConfig(variable=variable, synchronizer='AllReduce', groups=groups)
