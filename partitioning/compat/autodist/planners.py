"""AutoDist's eight planners; `_DECISIONS` lists what each of them decides.

`build` gives AutoDist's own decisions, in which the numbers of shards do not depend on a mesh.
`build_plan` splits the variables that AutoDist cuts, along the same dimensions, over one axis of a
mesh. Every planner computes exact gradients; planners differ in what each device holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from absl import logging
from jax.sharding import Mesh

from partitioning.compat.autodist.splits import PartitionerConfig, even_shards, uneven_shards
from partitioning.compat.autodist.strategy import Strategy
from partitioning.compat.autodist.variables import (
    GraphConfig,
    NodeConfig,
    Variable,
    describe_variables,
    given_variables,
)
from partitioning.compat.pytorch.modules import ShardingPlan, ShardingPlanner
from partitioning.rules import is_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoDistPlanner(ShardingPlanner):
    """The base class of AutoDist's planners.

    Attributes:
      mesh_axis: the mesh axis that variables are split over. The default is 'data', or the only
        axis larger than 1.
    """

    mesh_axis: str | None = None

    def build(self, variables: Any, servers: Sequence[str]) -> Strategy:
        """AutoDist's decisions.

        Args:
          variables: a sequence or iterator of `Variable`s in the order in which the model creates
            them, or a pytree of parameters, whose order is used (sorted keys, for dicts).
          servers: the names of the parameter servers, in order. At least one is required, although
            all-reduces do not use it.

        Raises:
          TypeError: if Variables are given in anything but a sequence or an iterator.
          ValueError: if there are no variables or servers, if a name appears twice, or as
            `describe_variables`.
        """
        graph = GraphConfig(planner=type(self).__name__, servers=servers)  # type: ignore[arg-type]
        given = given_variables(variables)
        described = self._describe(variables) if given is None else given
        nodes = tuple(_decide(self, described, graph.servers))
        return Strategy(node_config=nodes, graph_config=graph)

    def build_plan(self, module: Any, mesh: Mesh) -> ShardingPlan:
        """The decisions for a model, as a ShardingPlan for a mesh; see `Strategy.to_plan`."""
        # AutoDist uses the host CPU of each node as a server.
        processes = sorted({device.process_index for device in mesh.devices.flat})
        servers = [f'process {process}' for process in processes]
        return self.build(module, servers).to_plan(mesh, self.mesh_axis)

    def _describe(self, params: Any) -> tuple[Variable, ...]:
        return describe_variables(params, getattr(self, 'sparse', ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerPlanner(AutoDistPlanner):
    """The base class of planners that place variables on parameter servers.

    Attributes:
      local_proxy_variable: whether AutoDist would keep a copy of each variable with each replica.
        The strategy records it; on a mesh, every device has whole variables in either case.
      sync, staleness: must be True and 0. One program runs on all devices of a mesh, so each step
        waits for the gradients of all devices.
    """

    local_proxy_variable: bool = False
    sync: bool = True
    staleness: int = 0

    def __post_init__(self) -> None:
        if not self.sync or self.staleness:
            raise ValueError(
                f'{type(self).__name__}: sync={self.sync!r} with staleness={self.staleness!r} is '
                'not supported: each step of a program on a mesh waits for the gradients of all '
                'devices. Use sync=True and staleness=0.'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReducePlanner(AutoDistPlanner):
    """The base class of planners that all-reduce gradients.

    Attributes:
      chunk_size: the number of consecutive shards that share a collective group in the strategy.
        (XLA combines collectives by its own rules.)
      all_reduce_spec: must be 'AUTO', because XLA chooses the all-reduce.
      compressor: must be 'NoneCompressor'; use `compress_gradients` to compress.
    """

    chunk_size: int = 128
    all_reduce_spec: str = 'AUTO'
    compressor: str = 'NoneCompressor'

    def __post_init__(self) -> None:
        if not is_count(self.chunk_size):
            raise ValueError(f'chunk_size {self.chunk_size!r} must be an integer >= 1')
        if self.all_reduce_spec != 'AUTO':
            raise ValueError(
                f"all_reduce_spec must be 'AUTO' because XLA decides, not {self.all_reduce_spec!r}"
            )
        if self.compressor != 'NoneCompressor':
            raise ValueError(
                f"compressor must be 'NoneCompressor', not {self.compressor!r}: put "
                "compress_gradients(...) at the start of the optimizer's chain instead"
            )


class PS(ServerPlanner):
    """Places every variable whole on the first server; replicates it on a mesh."""


class PSLoadBalancing(ServerPlanner):
    """Places every variable whole on the least loaded server; replicates it on a mesh."""


class PartitionedPS(ServerPlanner):
    """Cuts dimension 0 in the fewest equal shards, placed by load; on a mesh, over one axis."""


class UnevenPartitionedPS(ServerPlanner):
    """Cuts dimension 0 in the smallest number of shards that does not divide its size.

    On a mesh, this is the same as PartitionedPS. jax lays out equal shards only; for rows that the
    axis does not divide, use on_indivisible='pad' of `ShardingPlan.resolve` or VariablePartitioner.
    Such a variable is whole in the state, and split with a padded last shard inside functions that
    `PjitPartitioner` partitions.
    """


class AllReduce(AllReducePlanner):
    """Leaves every variable whole and all-reduces its gradient; replicates it on a mesh."""


class PartitionedAR(AllReducePlanner):
    """Cuts dimension 0 in equal shards, and all-reduces each shard separately.

    On a mesh, each device keeps and updates its part of a variable and of its optimizer state.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAxisPartitionAR(AllReducePlanner):
    """Like PartitionedAR, but cuts every variable along a random dimension larger than 1.

    The dimension depends only on the seed and the name of the variable, so it is the same in every
    process, whatever other variables there are. Sparse variables are cut along dimension 0.

    Attributes:
      seed: an integer >= 0.
      sparse: the paths of variables with sparse gradients, or regular expressions that match them.
        A `Variable` has its own field for this.
    """

    seed: int = 0
    sparse: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.seed) and (self.seed != 0 or isinstance(self.seed, bool)):
            raise ValueError(f'seed {self.seed!r} must be an integer >= 0')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallax(ServerPlanner, AllReducePlanner):
    """Places variables with sparse gradients whole on servers by load, and all-reduces the others.

    On a mesh, sparse variables (embedding tables) are split by rows over the axis, and the others
    are replicated. All variables count for `chunk_size`, including sparse ones.

    Attributes:
      sparse: as for RandomAxisPartitionAR. By default, the planner assumes that every variable
        with 'embedding' in its name is sparse, and logs them.
    """

    sparse: Sequence[str] | None = None

    def __post_init__(self) -> None:
        ServerPlanner.__post_init__(self)
        AllReducePlanner.__post_init__(self)

    def _describe(self, params: Any) -> tuple[Variable, ...]:
        if self.sparse is not None:
            return super()._describe(params)
        guessed = tuple(
            dataclasses.replace(variable, sparse='embedding' in variable.name.lower())
            for variable in describe_variables(params)
        )
        names = ', '.join(v.name for v in guessed if v.sparse) or 'no variable'
        logging.info('Parallax assumes by name that these variables are sparse: %s', names)
        return guessed


class _Decision(NamedTuple):
    """What a planner decides: how many shards of which dimension, and who holds them."""

    on_servers: Literal['all', 'sparse', 'none']  # The other gradients are all-reduced.
    num_shards: Callable[[int], int] | None = None  # By size of the dimension; None cuts nothing.
    random_dimension: bool = False  # The default is dimension 0.
    first_server: bool = False  # The default is the least loaded one.

    def cut(self, variable: Variable, seed: int) -> PartitionerConfig | None:
        """How a variable is cut; None for a whole variable."""
        dims = [0] if variable.shape else []
        if self.random_dimension and not variable.sparse:
            dims = [dim for dim, size in enumerate(variable.shape) if size > 1]
        if not dims or self.num_shards is None:
            return None
        random = np.random.default_rng([seed, zlib.crc32(variable.name.encode())])
        cut = dims[random.integers(len(dims))]
        num_shards = self.num_shards(variable.shape[cut])
        counts = [num_shards if dim == cut else 1 for dim in range(len(variable.shape))]
        return PartitionerConfig(counts) if num_shards > 1 else None


_DECISIONS: dict[type, _Decision] = {
    PS: _Decision('all', first_server=True),
    PSLoadBalancing: _Decision('all'),
    PartitionedPS: _Decision('all', even_shards),
    UnevenPartitionedPS: _Decision('all', uneven_shards),
    AllReduce: _Decision('none'),
    PartitionedAR: _Decision('none', even_shards),
    RandomAxisPartitionAR: _Decision('none', even_shards, random_dimension=True),
    Parallax: _Decision('sparse'),
}


def _decide(
    planner: Any, variables: Sequence[Variable], servers: Sequence[str]
) -> Iterator[NodeConfig]:
    """The decision for each variable, in order."""
    decision = next(_DECISIONS[base] for base in type(planner).__mro__ if base in _DECISIONS)
    loads = dict.fromkeys(servers[:1] if decision.first_server else servers, 0.0)
    first = 0  # the number of shards of all variables before this one
    for variable in variables:
        config = decision.cut(variable, getattr(planner, 'seed', 0))
        shards = 1 if config is None else config.num_shards
        settings: dict[str, Any]
        if decision.on_servers == 'all' or (decision.on_servers == 'sparse' and variable.sparse):
            by_load = itertools.cycle(sorted(loads, key=loads.__getitem__))
            chosen = tuple(itertools.islice(by_load, shards))
            for server in chosen:  # every shard counts as an equal part of its variable
                loads[server] += variable.nbytes / shards
            # AutoDist copies no sparse variables of Parallax: a replica needs only a few rows.
            copied = decision.on_servers == 'all' and planner.local_proxy_variable
            settings = {'synchronizer': 'PS', 'servers': chosen, 'local_replication': copied}
        else:
            groups = tuple((first + n) // planner.chunk_size for n in range(shards))
            settings = {'synchronizer': 'AllReduce', 'groups': groups}
        partitioner = '' if config is None else config.partition_str
        yield NodeConfig(variable=variable, partitioner=partitioner, **settings)
        first += shards
