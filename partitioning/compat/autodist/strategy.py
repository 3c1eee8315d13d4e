"""What an AutoDist planner decides: for each variable its shards, and who synchronizes them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.compat.autodist.nodes import GraphConfig, NodeConfig
from partitioning.compat.autodist.placement import split_axis
from partitioning.compat.autodist.strategy_file import digest, from_json, to_json
from partitioning.compat.pytorch.sharding_plan import ShardingPlan
from partitioning.compat.pytorch.trees import Places, parameters
from partitioning.plan.tables import shape_str, text_table
from partitioning.rules import MeshLike, axis_sizes, nearest
from partitioning.state import shape_of
from partitioning.state.boxes import array_of

_LISTED = 6  # servers or groups of one variable in a report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """AutoDist's strategy: how each variable is cut, and what synchronizes its shards.

    Usage:
      strategy = PartitionedPS().build(params, servers=['A', 'B'])
      print(strategy.report())
      plan = strategy.to_plan(mesh)

    Attributes:
      node_config: the variables, in the order of the model.
      graph_config: what is said of all of them.
      path: the file that it was written to or read from; empty: none.
    """

    node_config: tuple[NodeConfig, ...]
    graph_config: GraphConfig
    path: str = dataclasses.field(default='', compare=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.node_config:
            if node.variable.name in seen:
                raise ValueError(f'{node.variable.name} is in the strategy more than once')
            seen.add(node.variable.name)
            for server in node.servers:
                if server not in self.graph_config.servers:
                    raise ValueError(
                        f'{node.variable.name} is placed on {server!r}, which is none of the '
                        f'servers.{nearest(server, self.graph_config.servers)}'
                    )

    @property
    def id(self) -> str:
        """A digest of what the strategy says, so that equal strategies have equal ids."""
        return digest(self.node_config, self.graph_config)

    @property
    def partitions(self) -> dict[str, str]:
        """The partition string of each variable; '' for a whole one."""
        return {node.variable.name: node.partitioner for node in self.node_config}

    @property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """The server of each shard, of the variables that servers hold."""
        return {n.variable.name: n.servers for n in self.node_config if n.synchronizer == 'PS'}

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The collective group of each shard, of the variables that are all-reduced."""
        return {n.variable.name: n.groups for n in self.node_config if n.groups}

    @property
    def loads(self) -> dict[str, float]:
        """Bytes of each server; a shard counts as an equal part of its variable."""
        loads = dict.fromkeys(self.graph_config.servers, 0.0)
        for node in self.node_config:
            for server in node.servers:
                loads[server] += node.variable.nbytes / node.num_shards
        return loads

    @property
    def balance(self) -> float:
        """The mean load of the servers over the largest: 1 where all hold the same."""
        loads = self.loads.values()
        return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0

    def to_plan(self, mesh: MeshLike, mesh_axis: str | None = None) -> ShardingPlan:
        """The strategy on a mesh.

        A mesh axis splits a variable over all of its devices, however many shards the strategy
        cuts it in; a mesh has no servers, so what is whole is on every device. Only of a variable
        with sparse gradients that servers hold a device needs but some rows: it is split by rows.

        Args:
          mesh: the mesh, or the sizes of its axes.
          mesh_axis: what split variables are split over; see `split_axis`.

        Returns:
          A plan with an entry for each variable. A dimension that the axis does not divide is an
          error when the plan is resolved, or what `on_indivisible` says then: 'pad' splits it
          unevenly, as UnevenPartitionedPS does.

        Raises:
          ValueError: no such mesh axis, or several that could be it.
        """
        axis = split_axis(axis_sizes(mesh), mesh_axis)
        return ShardingPlan({node.variable.name: _spec(node, axis) for node in self.node_config})

    def check_parameters(self, params: Any) -> None:
        """Raises ValueError unless the strategy is of these parameters, by name and shape."""
        arrays = parameters(params)
        places, seen = Places(arrays), set()
        for variable in (node.variable for node in self.node_config):
            path = places.find(variable.name)
            if path not in arrays or (shape := shape_of(array_of(arrays[path]))) != variable.shape:
                found = f'is of shape {shape}' if path in arrays else 'is a module'
                raise ValueError(
                    f'{variable.name} {found}, and the strategy was built for {variable.shape}: '
                    'build it for these parameters'
                )
            seen.add(path)
        if absent := ['/'.join(path) for path in arrays if path not in seen]:
            raise ValueError(
                f'the strategy has nothing of {_few(absent)}: build it for these parameters'
            )

    def report(self) -> str:
        """A table of the variables, and what each server would hold."""
        head = ('variable', 'shape', 'bytes', 'sparse', 'shards', 'partitioner', 'held by')
        rows = [
            (
                node.variable.name,
                shape_str(node.variable.shape),
                f'{node.variable.nbytes:,}',
                'yes' if node.variable.sparse else '',
                str(node.num_shards),
                node.partitioner or '-',
                _held_by(node),
            )
            for node in self.node_config
        ]
        lines = [f'{self.graph_config.planner}, strategy {self.id}', '', *text_table(head, rows)]
        if self.placements:
            loads = [(server, f'{load:,.0f}') for server, load in self.loads.items()]
            lines += ['', *text_table(('server', 'bytes'), loads)]
            lines += [f'balance {self.balance:.1%} (mean load over the largest)']
        return '\n'.join([*lines, ''])

    def to_json(self) -> str:
        """The strategy as the text of a file, the same for equal strategies of one path."""
        return to_json(self.node_config, self.graph_config, self.path)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The strategy that `to_json` wrote.

        Raises:
          ValueError: no such text, or one that was changed and has the id of before.
        """
        nodes, graph, path = from_json(text)
        return cls(node_config=nodes, graph_config=graph, path=path)

    def serialize(self, path: str | Path | None = None) -> Strategy:
        """Writes the strategy to a file, and returns it with its path.

        Raises:
          ValueError: no path: AutoDist's folder of strategies is none of ours.
        """
        if path is None:
            raise ValueError(f"serialize takes the file to write, such as '{self.id}.json'")
        written = dataclasses.replace(self, path=str(path))
        Path(path).write_text(written.to_json())
        return written

    @classmethod
    def deserialize(cls, path: str | Path) -> Strategy:
        """The strategy of a file.

        Raises:
          FileNotFoundError: there is no such file, as where the id of a strategy is given.
          ValueError: as `from_json`, with the path.
        """
        try:
            held = cls.from_json(Path(path).read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"there is no file '{path}': deserialize takes the path that serialize wrote, not "
                'the id of a strategy'
            ) from error
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error
        return dataclasses.replace(held, path=str(path))


def _spec(node: NodeConfig, mesh_axis: str) -> PartitionSpec:
    if node.config is not None:
        return PartitionSpec(*[None] * node.config.axis, mesh_axis)
    by_rows = node.variable.sparse and node.synchronizer == 'PS'
    return PartitionSpec(mesh_axis) if by_rows else PartitionSpec()


def _held_by(node: NodeConfig) -> str:
    """The servers or groups of a variable, in few words however many shards it has."""
    if node.synchronizer == 'AllReduce':
        groups = sorted(set(node.groups))
        return f'all-reduce {"group" if len(groups) == 1 else "groups"} {_few(groups)}'
    turns = tuple(dict.fromkeys(node.servers))
    if len(node.servers) <= max(_LISTED, len(turns)):
        return _few(node.servers)
    rounds = itertools.islice(itertools.cycle(turns), len(node.servers))
    return f'{_few(turns)} {"in turns" if tuple(rounds) == node.servers else "in another order"}'


def _few(names: Sequence[Any]) -> str:
    rest = len(names) - _LISTED
    return ', '.join(map(str, names[:_LISTED])) + (f' and {rest} more' if rest > 0 else '')
