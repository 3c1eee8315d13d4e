"""What an AutoDist planner decides: the shards of each variable, and what synchronizes them.

A file is JSON, with one line per variable in the order of the model:

    {"id": "3b1f60c2a9d4e875", "path": "", "graph_config": {"planner": "PS", "servers": ["A"]},
     "node_config": [{"name": "emb", "shape": [8, 16], "dtype": "float32", "sparse": false,
     "partitioner": "", "synchronizer": "PS", "servers": ["A"], "groups": [], ...}, ...]}

The id is a digest of graph_config and node_config, so equal strategies have equal ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.compat.autodist.splits import split_axis
from partitioning.compat.autodist.variables import (
    GraphConfig,
    NodeConfig,
    check_object,
    node_of,
    row_of,
)
from partitioning.compat.pytorch.modules import ShardingPlan
from partitioning.compat.pytorch.trees import Places, parameters
from partitioning.plan.tables import shape_str, text_table
from partitioning.rules import MeshLike, nearest
from partitioning.state import shape_of
from partitioning.state.boxes import array_of
from partitioning.untrusted_text import parse_json

_LISTED = 6  # the number of servers or groups of one variable that a report lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """AutoDist's strategy: how each variable is cut, and what synchronizes its shards.

    Attributes:
      node_config: one node per variable, in the order of the model.
      graph_config: the planner and the servers.
      path: the file that the strategy was written to or read from; empty without a file.
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
                        f'{node.variable.name} is placed on {server!r}, which is not one of the '
                        f'servers.{nearest(server, self.graph_config.servers)}'
                    )

    @property
    def id(self) -> str:
        """A digest of the content; equal strategies have equal ids."""
        rows = [row_of(node) for node in self.node_config]
        content = json.dumps([dataclasses.asdict(self.graph_config), rows], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def partitions(self) -> dict[str, str]:
        """The partition string of each variable; '' for a whole one."""
        return {node.variable.name: node.partitioner for node in self.node_config}

    @property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """The server of each shard, for the variables that servers hold."""
        return {n.variable.name: n.servers for n in self.node_config if n.synchronizer == 'PS'}

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The collective group of each shard, for the variables that are all-reduced."""
        return {n.variable.name: n.groups for n in self.node_config if n.groups}

    @property
    def loads(self) -> dict[str, float]:
        """The bytes on each server; every shard counts as an equal part of its variable."""
        loads = dict.fromkeys(self.graph_config.servers, 0.0)
        for node in self.node_config:
            for server in node.servers:
                loads[server] += node.variable.nbytes / node.num_shards
        return loads

    @property
    def balance(self) -> float:
        """The mean load of the servers over the largest; 1 if all loads are equal."""
        loads = self.loads.values()
        return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0

    def to_plan(self, mesh: MeshLike, mesh_axis: str | None = None) -> ShardingPlan:
        """The strategy as a ShardingPlan for a mesh.

        A mesh axis splits a variable over all of its devices, whatever the number of shards in the
        strategy. A mesh has no servers, so whole variables are replicated, except for sparse
        variables on servers: a device needs only a few of their rows, so they are split by rows.
        `ShardingPlan.resolve` decides about sizes that the axis does not divide.

        `mesh_axis` is the mesh axis that variables are split over; see `split_axis`.
        """
        axis = split_axis(mesh, mesh_axis)
        specs = {}
        for node in self.node_config:
            by_rows = node.variable.sparse and node.synchronizer == 'PS'
            spec = PartitionSpec(axis) if by_rows else PartitionSpec()
            if node.config is not None:
                spec = PartitionSpec(*[None] * node.config.axis, axis)
            specs[node.variable.name] = spec
        return ShardingPlan(specs)

    def check_parameters(self, params: Any) -> None:
        """Raises ValueError unless the strategy has the names and shapes of these parameters."""
        arrays = parameters(params)
        places, seen = Places(arrays), set()
        for variable in (node.variable for node in self.node_config):
            path = places.find(variable.name)
            if path not in arrays or (shape := shape_of(array_of(arrays[path]))) != variable.shape:
                found = f'has shape {shape}' if path in arrays else 'is a module'
                raise ValueError(
                    f'{variable.name} {found}, but the strategy was built for shape '
                    f'{variable.shape}: build it for these parameters'
                )
            seen.add(path)
        if absent := ['/'.join(path) for path in arrays if path not in seen]:
            raise ValueError(f'the strategy lacks {_few(absent)}: build it for these parameters')

    def report(self) -> str:
        """A table of the variables and of the load of each server."""
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
        """The text of the strategy's file; equal strategies with equal paths have equal text."""
        rows = ',\n'.join(f'  {json.dumps(row_of(node))}' for node in self.node_config)
        return (
            f'{{"id": "{self.id}", "path": {json.dumps(self.path)},\n'
            f' "graph_config": {json.dumps(dataclasses.asdict(self.graph_config))},\n'
            f' "node_config": [\n{rows}\n ]}}\n'
        )

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The strategy that `to_json` wrote; ValueError if its id does not match its content."""
        try:
            held = parse_json(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'a strategy file must be JSON: {error}') from error
        check_object('the strategy', held, ('id', 'path', 'graph_config', 'node_config'))
        check_object('graph_config', held['graph_config'], ('planner', 'servers'))
        if not isinstance(held['node_config'], list):
            raise ValueError(f'"node_config" must be a list of rows, not {held["node_config"]!r}')
        strategy = cls(
            node_config=tuple(map(node_of, held['node_config'])),
            graph_config=GraphConfig(**held['graph_config']),
            path=str(held['path']),
        )
        if held['id'] != strategy.id:
            raise ValueError(
                f'the file has the id {held["id"]!r}, but its content has the id '
                f'{strategy.id!r}: if you changed the content on purpose, write that id'
            )
        return strategy

    def serialize(self, path: str | Path) -> Strategy:
        """Writes the strategy to a file, and returns it with its path."""
        written = dataclasses.replace(self, path=str(path))
        Path(path).write_text(written.to_json())
        return written

    @classmethod
    def deserialize(cls, path: str | Path) -> Strategy:
        """Reads the strategy that `serialize` wrote; see `from_json`."""
        try:
            held = cls.from_json(Path(path).read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"'{path}' does not exist: deserialize takes the path that serialize wrote, not "
                'the id of a strategy'
            ) from error
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error
        return dataclasses.replace(held, path=str(path))


def _held_by(node: NodeConfig) -> str:
    if node.synchronizer == 'PS':
        return _few(node.servers)
    groups = sorted({*node.groups})
    return f'all-reduce group{"s" * (len(groups) > 1)} {_few(groups)}'


def _few(names: Sequence[Any]) -> str:
    rest = len(names) - _LISTED
    return ', '.join(map(str, names[:_LISTED])) + (f' and {rest} more' if rest > 0 else '')
