"""The variables of a model, and the decisions of a strategy about them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Literal

import jax
import jax.numpy as jnp

from partitioning.compat.autodist.splits import PartitionerConfig, check_sparse_axis, split_sizes
from partitioning.compat.pytorch.trees import parameters
from partitioning.plan.plan_file import check_keys
from partitioning.rules import is_count, nearest
from partitioning.state import shape_of
from partitioning.state.boxes import array_of


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable of a model.

    Attributes:
      name: the path of the variable, such as 'fc1/kernel'.
      shape: the global shape.
      dtype: the dtype, such as 'float32'.
      sparse: whether the gradient covers only a few rows, as for an embedding table. In jax it is
        dense anyway; this only decides what planners do with the variable.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = 'float32'
    sparse: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, 'shape', tuple(int(size) for size in self.shape))
        object.__setattr__(self, 'dtype', str(jnp.dtype(self.dtype)))

    @property
    def nbytes(self) -> int:
        """The size of the whole variable, in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def describe_variables(params: Any, sparse: Sequence[str] = ()) -> tuple[Variable, ...]:
    """The variables of a tree of parameters or an nnx module, in the order of the tree.

    jax sorts the keys of a dict; a collections.OrderedDict keeps the order of creation. `sparse`
    has the paths of variables with sparse gradients, or regular expressions that match them.

    Raises:
      ValueError: if there are no variables, or if an entry of `sparse` is not a regular expression
        or matches no variable.
    """
    arrays = {'/'.join(path): array_of(x) for path, x in parameters(params).items()}
    declared = _matching(sparse, arrays)
    return tuple(
        Variable(name, shape_of(array), str(jnp.result_type(array)), name in declared)
        for name, array in arrays.items()
    )


def given_variables(x: Any) -> tuple[Variable, ...] | None:
    """The `Variable`s of a sequence or an iterator, or None for a tree of parameters."""
    held = tuple(x) if isinstance(x, Iterator | ValuesView) else x
    found = [isinstance(leaf, Variable) for leaf in jax.tree.leaves(held)]
    if held is x and not any(found):
        return None
    if held == ():
        raise ValueError('there are no variables: the iterator is empty')
    if isinstance(held, list | tuple) and all(isinstance(v, Variable) for v in held):
        return tuple(held)
    raise TypeError(
        f'{sum(found)} of the {len(found)} leaves of a {type(x).__name__} are Variables: give a '
        'list of Variables only, or a pytree of parameters only'
    )


def _matching(patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """The names that are equal to one of the patterns or match it."""
    if isinstance(patterns, str):
        raise ValueError(f'sparse={patterns!r} must be a list of paths: write [{patterns!r}]')
    known, found = list(names), set()
    for pattern in patterns:
        try:
            matched = [n for n in known if n == pattern or re.fullmatch(pattern, n)]
        except re.error as error:
            raise ValueError(f'sparse: {pattern!r} is not a regular expression: {error}') from error
        if not matched:
            raise ValueError(f'sparse: {pattern!r} matches no variable.{nearest(pattern, known)}')
        found.update(matched)
    return frozenset(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a strategy says of one variable.

    Attributes:
      variable: the variable.
      partitioner: how the variable is cut, such as '2,1'; empty for a whole variable.
      synchronizer: what combines the gradients of all replicas: servers ('PS') or 'AllReduce'.
      servers: the server of each shard, for 'PS'.
      groups: the collective group of each shard, for 'AllReduce'.
      local_replication: whether AutoDist would keep a copy with each replica, for 'PS'.
    """

    variable: Variable
    partitioner: str = ''
    synchronizer: Literal['PS', 'AllReduce']
    servers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    local_replication: bool = False

    def __post_init__(self) -> None:
        name, shape, shards = self.variable.name, self.variable.shape, self.num_shards
        if (config := self.config) is not None:
            config.check_rank(shape, name)
            if self.variable.sparse:
                check_sparse_axis(config.axis, name)
            split_sizes(shape[config.axis], shards)
        if self.synchronizer not in ('PS', 'AllReduce'):
            raise ValueError(
                f"{name}: synchronizer must be 'PS' or 'AllReduce', not {self.synchronizer!r}"
            )
        servers, groups = (shards, 0) if self.synchronizer == 'PS' else (0, shards)
        if (len(self.servers), len(self.groups)) != (servers, groups):
            raise ValueError(
                f'{name}: {self.synchronizer} of {shards} shards needs {servers} servers and '
                f'{groups} groups, not {self.servers} and {self.groups}'
            )

    @property
    def config(self) -> PartitionerConfig | None:
        """How the variable is cut; None for a whole variable."""
        return PartitionerConfig(partition_str=self.partitioner) if self.partitioner else None

    @property
    def num_shards(self) -> int:
        """The number of shards of the variable."""
        return 1 if self.config is None else self.config.num_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """What a strategy says of all variables.

    Attributes:
      planner: the name of the planner that made it, such as 'PartitionedPS'.
      servers: the parameter servers, whether or not they are used.
    """

    planner: str
    servers: tuple[str, ...]

    def __post_init__(self) -> None:
        names = self.servers
        listed = () if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
        if not listed or not all(isinstance(name, str) and name for name in listed):
            raise ValueError(f"servers {names!r} must be a list of names, such as ['A', 'B']")
        if twice := [name for name in listed if listed.count(name) > 1]:
            raise ValueError(f'servers {names!r}: {twice[0]!r} appears twice')
        object.__setattr__(self, 'servers', listed)


_VARIABLE_KEYS = tuple(field.name for field in dataclasses.fields(Variable))
_NODE_KEYS = tuple(f.name for f in dataclasses.fields(NodeConfig) if f.name != 'variable')
_TYPES: dict[str, type] = dict.fromkeys(('shape', 'servers', 'groups'), list)
_TYPES |= dict.fromkeys(('sparse', 'local_replication'), bool)
_TYPES |= dict.fromkeys(('name', 'partitioner'), str)


def row_of(node: NodeConfig) -> dict[str, Any]:
    """The row of a strategy file for one variable."""
    held = dataclasses.asdict(node)
    return held.pop('variable') | held


def node_of(row: Any) -> NodeConfig:
    """What the row of a strategy file says; a row that is not valid raises ValueError."""
    check_object('a row of "node_config"', row, (*_VARIABLE_KEYS, *_NODE_KEYS))
    where = repr(row['name'])
    for key, kind in _TYPES.items():
        if not isinstance(row[key], kind):
            raise ValueError(f'{where}: "{key}" must be a {kind.__name__}, not {row[key]!r}')
    if not all(is_count(size) or size == 0 for size in row['shape']):
        raise ValueError(f'{where}: "shape" must be a list of sizes, not {row["shape"]!r}')
    if not all(isinstance(group, int) for group in row['groups']):
        raise ValueError(f'{where}: "groups" must be a list of integers, not {row["groups"]!r}')
    try:
        variable = Variable(**{key: row[key] for key in _VARIABLE_KEYS})
    except TypeError as error:
        raise ValueError(f'{where}: "dtype" {row["dtype"]!r} is not a dtype') from error
    held: dict[str, Any] = {key: row[key] for key in _NODE_KEYS}
    held |= {key: tuple(row[key]) for key in ('servers', 'groups')}
    return NodeConfig(variable=variable, **held)


def check_object(where: str, held: Any, keys: Sequence[str]) -> None:
    """Raises ValueError unless a value of JSON is an object with exactly these keys."""
    if not isinstance(held, Mapping):
        raise ValueError(f'{where} must be an object with {", ".join(keys)}, not {held!r}')
    check_keys(where, held, keys, keys)
