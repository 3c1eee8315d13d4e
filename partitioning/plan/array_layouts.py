"""The layout of each array of a state, in numbers, with what it costs and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.plan.rule_set import ResolvedLeaf, ResolvedState
from partitioning.rules import (
    AxisNames,
    ResolvedDimension,
    as_tuple,
    boundary_spec,
    describe_axes,
    spec_str,
)
from partitioning.state import Path, Role, array_leaves, nbytes, shape_of


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """One array of a state.

    Attributes:
      path: its place in the state, `params/decoder/embedding`.
      shape: global shape.
      dtype: its type, `float32`.
      logical_axes: the name of each dimension.
      spec: the mesh axes of each dimension, of an array as it is laid out, or as it will be.
      shard_shape: what one device holds.
      bytes_total: of the global array.
      bytes_per_device: of one device's shard.
      category: 'parameters', 'optimizer' or 'other'.
      replicated_bytes_per_device: what one device holds beyond its even share of the array.
      reason: why it holds more than its share, or is misplaced; empty where neither is so.
      policy: what was done about sizes that do not divide, or names without a rule, with the
        nearest sizes that need nothing; empty where nothing was done.
      policy_bytes_per_device: what one device holds more than without the need of a policy.
      misplaced: an array that is not laid out as the rules say.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: AxisNames
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    bytes_total: int
    bytes_per_device: int
    category: Role
    replicated_bytes_per_device: int
    reason: str
    policy: str
    policy_bytes_per_device: int
    misplaced: bool


def sharding_str(sharding: Any) -> str:
    """A sharding in words: `P('data') over data 4 x model 2`."""
    if isinstance(sharding, NamedSharding):
        return f'{spec_str(sharding.spec)} over {describe_axes(sharding.mesh.shape)}'
    return str(sharding)


def array_layouts(state: Any, resolved: ResolvedState) -> list[tuple[ArrayLayout, Sharding | None]]:
    """The layout of every array of a state, in its order, and its own sharding if it is misplaced.

    Args:
      state: arrays or ShapeDtypeStructs, in boxes or without.
      resolved: the same state with its names, and the rules applied.

    Raises:
      ValueError: the two are not of the same arrays.
    """
    plans = {x.leaf.path: x for x in resolved.arrays}
    arrays = array_leaves(state)
    layouts = [
        _layout(path, array, _plan(path, array, plans), resolved.mesh) for path, array in arrays
    ]
    absent = plans.keys() - {path for path, _ in arrays}
    for path in sorted(absent):
        if not plans[path].leaf.said_none:
            raise ValueError(
                f'{"/".join(path)} of the state with names is not in the state: give all of it'
            )
    return layouts


def _plan(path: Path, array: Any, plans: Mapping[Path, ResolvedLeaf]) -> ResolvedLeaf:
    """The plan of an array, or of what it is part of, where a state has None for all of that."""
    plan = next((plans[path[:n]] for n in range(len(path), -1, -1) if path[:n] in plans), None)
    name = '/'.join(path)
    if plan is None or (plan.leaf.path != path and not plan.leaf.said_none):
        raise ValueError(f'{name} is not in the state with names: give the names of this state')
    planned = plan.leaf.array
    shape = shape_of(array)
    if planned is not None and shape_of(planned) != shape:
        raise ValueError(
            f'{name}: shape {shape}, but {planned.shape} in the state with names: give the names '
            'of this state'
        )
    return plan


def _layout(
    path: Path, array: Any, plan: ResolvedLeaf, mesh: Mesh
) -> tuple[ArrayLayout, Sharding | None]:
    shape = shape_of(array)
    spec = boundary_spec(plan.spec) or PartitionSpec(*[None] * len(shape))
    planned = NamedSharding(mesh, spec)
    held = array.sharding if isinstance(array, jax.Array) else planned
    misplaced = not held.is_equivalent_to(planned, len(shape))
    shard_shape = tuple(held.shard_shape(shape))
    total = nbytes(array)
    per_device = total * math.prod(shard_shape) // max(math.prod(shape), 1)
    # What has one element cannot be shared.
    replicated = max(per_device - -(-total // mesh.size), 0) if math.prod(shape) > 1 else 0
    reason = _reason(plan, shape, mesh) if replicated else ''
    if misplaced:
        reason = f'it is laid out as {sharding_str(held)}, not {spec_str(spec)} as the rules say'
    policy, policy_bytes = _policy(plan, total, per_device, mesh)
    layout = ArrayLayout(
        path='/'.join(path),
        shape=shape,
        dtype=str(getattr(array, 'dtype', type(array).__name__)),
        logical_axes=plan.leaf.names,
        spec=getattr(held, 'spec', spec) if misplaced else spec,
        shard_shape=shard_shape,
        bytes_total=total,
        bytes_per_device=per_device,
        category=plan.leaf.role,
        replicated_bytes_per_device=replicated,
        reason=reason,
        policy=policy,
        policy_bytes_per_device=policy_bytes,
        misplaced=misplaced,
    )
    return layout, held if misplaced else None


def _reason(plan: ResolvedLeaf, shape: tuple[int, ...], mesh: Mesh) -> str:
    """Why devices along some mesh axes hold the same of an array."""
    spec = boundary_spec(plan.spec) or ()
    used = {axis for axes in spec for axis in as_tuple(axes)}
    free = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
    if plan.leaf.said_none:
        why = 'its state names no axes for it'
    elif not shape:
        why = 'a scalar'
    elif plan.leaf.parameter is None:
        why = 'it has no names and follows no parameter'
    else:
        subjects: dict[str, list[str]] = {}
        for dim, size in enumerate(shape):
            if size > 1:
                for subject, why in _whys(dim, plan.dimensions[dim], bool(spec[dim]), {*free}):
                    subjects.setdefault(why, []).append(subject)
        whys = [f'{", ".join(names)}: {why}' for why, names in subjects.items()]
        why = '; '.join(whys) or 'no dimension is left for it'
    return f'over {", ".join(free)}: {why}'


def _whys(
    dim: int, resolved: ResolvedDimension | None, sharded: bool, free: set[str]
) -> Iterator[tuple[str, str]]:
    """What kept a dimension, or a rule for it, from the mesh axes that its array leaves free."""
    if resolved is None:
        yield f'dimension {dim}', 'none of its parameter'
    elif resolved.name is None:
        yield f'dimension {dim}', 'it has no name'
    elif not sharded:
        yield str(resolved.name), resolved.reason
    else:
        for rule, why in resolved.lost:
            if free & {*as_tuple(rule[1])}:
                yield f'rule {rule!r}', why


def _policy(plan: ResolvedLeaf, total: int, per_device: int, mesh: Mesh) -> tuple[str, int]:
    """What policies did to an array, and the bytes that they cost a device."""
    applied = [d for d in plan.dimensions if d is not None and d.policy is not None]
    wanted = [axis for d in plan.dimensions if d is not None for axis in as_tuple(d.wanted)]
    texts = []
    for d in applied:
        fits = f'; {" or ".join(map(str, d.fits))} would need none' if d.fits else ''
        texts.append(f'{d.name}: {d.policy}, {d.reason}{fits}')
    even = -(-total // math.prod(mesh.shape[axis] for axis in wanted))
    return '; '.join(texts), max(per_device - even, 0) if applied else 0
