"""The file format of strategies: JSON with a line for each variable, in the order of the model.

    {"id": "3b1f60c2a9d4e875", "path": "",
     "graph_config": {"planner": "PartitionedPS", "servers": ["A", "B"]},
     "node_config": [
      {"name": "emb", "shape": [10000, 16], "dtype": "float32", "sparse": false,
       "partitioner": "2,1", "synchronizer": "PS", "servers": ["A", "B"], "groups": [],
       "local_replication": false}
     ]}

The id is a digest of the last two, so that equal strategies have equal ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from partitioning.compat.autodist.nodes import GraphConfig, NodeConfig
from partitioning.compat.autodist.variables import Variable
from partitioning.rules import is_count, nearest

_OF_VARIABLE = tuple(field.name for field in dataclasses.fields(Variable))
_OF_NODE = tuple(f.name for f in dataclasses.fields(NodeConfig) if f.name != 'variable')
_OF_GRAPH = tuple(field.name for field in dataclasses.fields(GraphConfig))
_TYPES = {'sparse': bool, 'local_replication': bool, 'servers': list, 'groups': list}


def digest(nodes: Sequence[NodeConfig], graph: GraphConfig) -> str:
    """16 hexadecimal digits of what a strategy says."""
    said = json.dumps([dataclasses.asdict(graph), [_row(node) for node in nodes]], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def to_json(nodes: Sequence[NodeConfig], graph: GraphConfig, path: str) -> str:
    """The text of a file; see the format above."""
    rows = ',\n'.join(f'  {json.dumps(_row(node))}' for node in nodes)
    return (
        f'{{"id": "{digest(nodes, graph)}", "path": {json.dumps(path)},\n'
        f' "graph_config": {json.dumps(dataclasses.asdict(graph))},\n'
        f' "node_config": [\n{rows}\n ]}}\n'
    )


def from_json(text: str) -> tuple[tuple[NodeConfig, ...], GraphConfig, str]:
    """The variables, what is said of all, and the path, of the text of a file.

    Raises:
      ValueError: no such text; an id that is not that of the rest, which was changed by hand.
    """
    try:
        held = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'a strategy is JSON, but this is none: {error}') from error
    _check_keys('the strategy', held, ('id', 'path', 'graph_config', 'node_config'))
    _check_keys('graph_config', held['graph_config'], _OF_GRAPH)
    graph = GraphConfig(**held['graph_config'])
    if not isinstance(held['node_config'], list):
        raise ValueError(f'"node_config" must be a list of rows, not {held["node_config"]!r}')
    nodes = tuple(map(_node, held['node_config']))
    if held['id'] != digest(nodes, graph):
        raise ValueError(
            f'the file has the id {held["id"]!r}, but what it says has {digest(nodes, graph)!r}: '
            'after a change write that'
        )
    return nodes, graph, str(held['path'])


def _row(node: NodeConfig) -> dict[str, Any]:
    held = dataclasses.asdict(node)
    return held.pop('variable') | held


def _node(row: Any) -> NodeConfig:
    name = row.get('name') if isinstance(row, Mapping) else None
    where = repr(name or row)
    _check_keys(where, row, (*_OF_VARIABLE, *_OF_NODE))
    for key, kind in _TYPES.items():
        if not isinstance(row[key], kind):
            raise ValueError(f'{where}: "{key}" must be a {kind.__name__}, not {row[key]!r}')
    shape = row['shape']
    if not isinstance(shape, list) or not all(is_count(n) or n == 0 for n in shape):
        raise ValueError(f'{where}: "shape" must be a list of sizes, not {shape!r}')
    try:
        variable = Variable(**{key: row[key] for key in _OF_VARIABLE})
    except TypeError as error:
        raise ValueError(f'{where}: "dtype" {row["dtype"]!r} is no type of arrays') from error
    held = {key: row[key] for key in _OF_NODE}
    return NodeConfig(
        variable=variable,
        **held | {'servers': tuple(row['servers']), 'groups': tuple(row['groups'])},
    )


def _check_keys(where: str, held: Any, keys: Sequence[str]) -> None:
    """Raises ValueError unless a JSON object has just these keys."""
    if not isinstance(held, Mapping):
        raise ValueError(f'{where} must be an object with {", ".join(keys)}, not {held!r}')
    for key in held:
        if key not in keys:
            raise ValueError(f'{where} has no {key!r}.{nearest(key, keys)}')
    if absent := [key for key in keys if key not in held]:
        raise ValueError(f'{where} lacks {", ".join(absent)}')
