"""Computes which part of a function's arguments each device holds, from their layouts alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshwright.calls.partitioned import ArgumentLike, BoundaryLike, PartitionerLike
from partitioning.plan import Plan, PlanRow
from partitioning.plan.rows import make_row
from partitioning.rules import (
    MeshLike,
    ResolvedDimension,
    as_tuple,
    axis_sizes,
    boundary_spec,
    dimension_axes,
    from_tuple,
    sharding_axes,
    spec_str,
)
from partitioning.state import Role, key_names, shape_of

ArgumentRole = Literal['parameters', 'optimizer', 'batch', 'other']
ROLES: tuple[ArgumentRole, ...] = get_args(ArgumentRole)

# The usual names of these parts of a state and of these arguments.
_PARAMETERS = {'params', 'parameters', 'param', 'target', 'weights', 'variables'}
_OPTIMIZER = {'opt_state', 'param_states', 'optimizer', 'optimizer_state', 'opt'}
_BATCH = {'batch', 'inputs', 'examples', 'data', 'minibatch', 'tokens', 'microbatch'}
_BATCHES = (('x',), ('y',), ('labels',), ('targets',), ('images',))
# The usual names in functions that no partitioner knows.
_MOMENTS = {'mu', 'nu', 'momentum', 'trace'}
MODELS = {'model', 'state'}
_LEAVES = {'kernel', 'bias', 'scale', 'embedding', 'weight', 'w', 'b'}
ON_HOST = ('pinned_host', 'unpinned_host')


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldArray:
    """An array of the arguments.

    Attributes:
      row: its layout, with reasons. The path of an array outside of a state begins with the name of
        its argument.
      role: what it is for.
      nbytes: the bytes of it in the memory of one device.
    """

    row: PlanRow
    role: ArgumentRole
    nbytes: int


def find_held(
    boundary: BoundaryLike,
    args: Sequence[Any],
    partitioner: PartitionerLike,
    data_axes: tuple[str, ...],
) -> tuple[HeldArray, ...]:
    """Lists the arrays of the arguments of a function.

    Args:
      boundary: the arguments of the function, with their layouts.
      args: the arguments of a call, abstract or not.
      partitioner: the partitioner that knows the names of states.
      data_axes: the mesh axes of the batch.

    Raises:
      TreeMismatchError: if the arguments do not have the structure of their layouts.
    """
    return tuple(
        array
        for argument in boundary.dynamic(args)
        for array in _arrays_of(argument, partitioner, data_axes, boundary.mesh)
    )


def free_axes(row: PlanRow, mesh: MeshLike) -> tuple[str, ...]:
    """The mesh axes along which all devices have the same part of an array."""
    used = {axis for entry in boundary_spec(row.spec) for axis in sharding_axes(entry)}
    return tuple(a for a, size in axis_sizes(mesh).items() if size > 1 and a not in used)


def _arrays_of(
    argument: ArgumentLike, partitioner: PartitionerLike, data_axes: tuple[str, ...], mesh: MeshLike
) -> Iterator[HeldArray]:
    leaves = [
        (key_names(path), entry, x)
        for path, entry, x in argument.pairs()
        if hasattr(x, 'shape') or isinstance(x, bool | int | float | complex)
    ]
    is_batch = _is_batch(argument.name, leaves, data_axes)
    plan = None if is_batch else plan_of(argument.value, partitioner)
    rows = {} if plan is None else {row.path: row for row in plan.rows}
    for path, entry, x in leaves:
        known = rows.get('/'.join(path))
        role = 'batch' if is_batch else _role(argument.name, path, known)
        sharding = _sharding(entry, x)
        name = '/'.join(path) if known is not None else '/'.join((argument.name, *path))
        row = _row(name, x, sharding, known, mesh)
        on_host = getattr(sharding, 'memory_kind', None) in ON_HOST
        yield HeldArray(row=row, role=role, nbytes=0 if on_host else row.bytes_per_device)


def _row(
    path: str, x: Any, sharding: Sharding | None, known: PlanRow | None, mesh: MeshLike
) -> PlanRow:
    """The row of an array: the plan's row if it is laid out as planned."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    given = spec_str(spec) if any(map(sharding_axes, spec)) else 'None'
    why = f'the function was partitioned with {given}'
    row = row_of_array(path, x, spec, mesh, why, known)
    if row is known or sharding is None or isinstance(sharding, NamedSharding):
        return row
    return row._replace(shard_shape=tuple(sharding.shard_shape(shape_of(x))))


def row_of_array(
    path: str,
    x: Any,
    spec: PartitionSpec,
    mesh: MeshLike,
    why: str,
    known: PlanRow | None,
    role: Role = 'other',
) -> PlanRow:
    """The known row of an array if it has this layout, and otherwise a new one with its names."""
    rank = len(shape_of(x))
    axes = [entry or () for entry in dimension_axes(spec, rank)]
    names: Sequence[Any] = (None,) * rank
    if known is not None:
        planned = dimension_axes(boundary_spec(known.spec), rank)
        if [entry or () for entry in planned] == axes:
            return known
        names, role = known.logical_axes, known.role
    dimensions = [
        ResolvedDimension(name, from_tuple(entry), None, (), why)
        for name, entry in zip(names, axes, strict=True)
    ]
    return make_row(path, x, mesh, dimensions, role)


def _sharding(entry: Any, x: Any) -> Sharding | None:
    """The sharding that the function gives to an argument, or else the array's sharding."""
    found = entry if isinstance(entry, Sharding) else getattr(x, 'sharding', None)
    return found if isinstance(found, Sharding) else None


def plan_of(
    value: Any,
    partitioner: PartitionerLike,
    errors: tuple[type[Exception], ...] = (Exception,),
) -> Plan | None:
    """The plan of an argument that is a state, or None.

    Args:
      value: the argument.
      partitioner: the partitioner.
      errors: what the partitioner raises if a value is not its state, by default anything.
    """
    if callable(value) and jax.tree_util.all_leaves([value]):
        return None  # a constant of the call; as an argument of `plan` it would be called
    try:
        plan = partitioner.plan(value)
    except errors:
        return None
    return plan if any(row.role == 'parameters' for row in plan.rows) else None


def _role(name: str, path: Sequence[str], known: PlanRow | None) -> ArgumentRole:
    """The role of an array: by its plan, or by the names of what contains it."""
    if known is not None and known.role != 'other':
        return known.role
    parts = {name, *path}
    if parts & _OPTIMIZER:
        return 'optimizer'
    return 'parameters' if known is None and parts & _PARAMETERS else 'other'


def named_role(path: Sequence[str], x: Any) -> ArgumentRole:
    """The role of an array of a plain function, by the names of what contains it."""
    parts = set(path)
    if parts & _OPTIMIZER or parts & _MOMENTS:
        return 'optimizer'
    if parts & _BATCH or path[:1] in _BATCHES:
        return 'batch'
    is_matrix = len(path) == 1 and len(shape_of(x)) > 1  # an argument b is a bias or a batch
    leaves = _LEAVES - {'b'} if is_matrix else _LEAVES
    if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) and (
        parts & _PARAMETERS or parts & MODELS or {*path[-1:]} & leaves
    ):
        return 'parameters'
    return 'other'


def _is_batch(
    name: str, leaves: Sequence[tuple[Sequence[str], Any, Any]], data_axes: tuple[str, ...]
) -> bool:
    """Whether an argument is the batch: by its name, or because its rows are sharded like one."""
    if name in _BATCH:
        return True
    arrays = [(entry, x) for _, entry, x in leaves if shape_of(x)]
    parts = {part for path, _, _ in leaves for part in path} | {name}
    if not arrays or not data_axes or parts & (_PARAMETERS | _OPTIMIZER):
        return False
    return all(_first_axes(_sharding(entry, x)) == data_axes for entry, x in arrays) and any(
        jax.numpy.issubdtype(x.dtype, jax.numpy.integer) for _, x in arrays if hasattr(x, 'dtype')
    )


def _first_axes(sharding: Sharding | None) -> tuple[str, ...]:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    return as_tuple(spec[0]) if len(spec) else ()
