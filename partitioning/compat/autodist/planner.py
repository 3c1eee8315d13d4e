"""What AutoDist's planners have in common.

AutoDist's numbers of shards know no mesh: `build` gives what AutoDist decides, and `build_plan`
splits the variables that it cuts, along the dimensions it chooses, over one axis of the mesh.
Whatever the planner, gradients are exact: planners differ in what each device holds.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from partitioning.compat.autodist.nodes import GraphConfig, NodeConfig
from partitioning.compat.autodist.partitioner_config import PartitionerConfig
from partitioning.compat.autodist.placement import check_servers, place_shards, servers_of
from partitioning.compat.autodist.splits import even_shards, uneven_shards
from partitioning.compat.autodist.strategy import Strategy
from partitioning.compat.autodist.variables import Variable, describe_variables, given_variables
from partitioning.compat.pytorch.sharding_plan import ShardingPlan, ShardingPlanner
from partitioning.rules import is_count

# How a variable is cut; None: not at all.
Cut = Callable[[Variable], PartitionerConfig | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoDistPlanner(ShardingPlanner):
    """What AutoDist's planners have in common.

    Usage:
      params = shard_module(params, PartitionedPS().build_plan(params, mesh), mesh)
      print(PSLoadBalancing().build(params, servers=['A', 'B']).report())

    Attributes:
      mesh_axis: the mesh axis that split variables are split over; by default 'data', or the only
        axis larger than 1.
    """

    mesh_axis: str | None = None

    def build(self, variables: Any, servers: Sequence[str]) -> Strategy:
        """What AutoDist decides.

        Args:
          variables: `Variable`s, a sequence or an iterator, in the order in which the model
            creates them; or a pytree of parameters, in its order, which for dicts is that of the
            sorted keys.
          servers: names of the parameter servers, in their order; all-reduces need none, but one
            must be given.

        Raises:
          TypeError: a `Variable` alone, or in anything but a sequence or an iterator of them.
          ValueError: no variables or servers, or two of one name; an entry of `sparse` that names
            no variable.
        """
        names = check_servers(servers)
        given = given_variables(variables)
        described = self._describe(variables) if given is None else given
        nodes = tuple(self._nodes(described, names))
        graph = GraphConfig(planner=type(self).__name__, servers=names)
        return Strategy(node_config=nodes, graph_config=graph)

    def build_plan(self, module: Any, mesh: Mesh) -> ShardingPlan:
        """The strategy for a model on a mesh; see `Strategy.to_plan`.

        Args:
          module: parameters, abstract or not; linen variables; or an nnx module.
          mesh: the mesh.

        Raises:
          ValueError: as `build`; no such mesh axis, or several that could be it.
        """
        return self.build(module, servers_of(mesh)).to_plan(mesh, self.mesh_axis)

    def _describe(self, params: Any) -> tuple[Variable, ...]:
        """The variables of a tree of parameters."""
        return describe_variables(params)

    @abc.abstractmethod
    def _nodes(self, variables: Sequence[Variable], servers: Sequence[str]) -> Iterator[NodeConfig]:
        """What becomes of each variable."""


def whole(variable: Variable) -> None:
    """Not cut."""


def even_rows(variable: Variable) -> PartitionerConfig | None:
    """Along dimension 0, in the smallest number of equal shards."""
    return along(variable, 0, even_shards(variable.shape[0])) if variable.shape else None


def uneven_rows(variable: Variable) -> PartitionerConfig | None:
    """Along dimension 0, in the smallest number of shards that does not divide it."""
    return along(variable, 0, uneven_shards(variable.shape[0])) if variable.shape else None


def along(variable: Variable, dim: int, num_shards: int) -> PartitionerConfig | None:
    """In a number of shards along one dimension; in 1, not at all."""
    if num_shards == 1:
        return None
    return PartitionerConfig([num_shards if d == dim else 1 for d in range(len(variable.shape))])


def on_servers(
    variables: Sequence[Variable], servers: Sequence[str], cut: Cut, local_replication: bool
) -> Iterator[NodeConfig]:
    """Variables on servers, each shard on the one with the fewest bytes before its variable."""
    loads = dict.fromkeys(servers, 0.0)
    for variable in variables:
        config = cut(variable)
        shards = 1 if config is None else config.num_shards
        chosen, loads = place_shards(loads, variable.nbytes, shards)
        yield NodeConfig(
            variable=variable,
            partitioner='' if config is None else config.partition_str,
            synchronizer='PS',
            servers=chosen,
            local_replication=local_replication,
        )


def all_reduced(variables: Sequence[Variable], cut: Cut, chunk_size: int) -> Iterator[NodeConfig]:
    """Variables whose gradients are all-reduced, so many shards in a row in each group."""
    first = 0
    for variable in variables:
        config = cut(variable)
        shards = 1 if config is None else config.num_shards
        yield NodeConfig(
            variable=variable,
            partitioner='' if config is None else config.partition_str,
            synchronizer='AllReduce',
            groups=tuple((first + shard) // chunk_size for shard in range(shards)),
        )
        first += shards


def check_all_reduce(chunk_size: Any, all_reduce_spec: Any, compressor: Any) -> None:
    """Raises ValueError for groups without a size, and for what XLA and optax decide instead."""
    if not is_count(chunk_size):
        raise ValueError(f'chunk_size {chunk_size!r} must be a whole number greater than zero')
    if all_reduce_spec != 'AUTO':
        raise ValueError(
            f'all_reduce_spec {all_reduce_spec!r} cannot be had: XLA chooses the all-reduce. '
            "Leave it at 'AUTO'."
        )
    if compressor != 'NoneCompressor':
        raise ValueError(
            f'compressor {compressor!r}: compressors are optax transformations here. Leave it at '
            "'NoneCompressor', and put compress_gradients(...) first of the optimizer's chain."
        )
