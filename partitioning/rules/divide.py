"""Sizes that their mesh axes do not divide: the problem, and what a policy makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.rules.names import (
    MeshLike,
    OnIndivisible,
    as_tuple,
    axis_sizes,
    describe_axes,
)
from partitioning.rules.outcome import Problem, ResolvedDimension, check_spec, spec_str


def sharded_over(mesh_axes: Any) -> tuple[str, ...]:
    """Mesh axes as a tuple, empty for None and for PartitionSpec.UNCONSTRAINED."""
    return as_tuple(mesh_axes) if isinstance(mesh_axes, str | tuple) else ()


def _sizes_that_fit(size: int, ways: int) -> tuple[int, ...]:
    above = -(-size // ways) * ways
    return (above - ways, above) if above > ways else (above,)


def indivisible(resolved: ResolvedDimension, dim: int, shape: Sequence[int], ways: int) -> Problem:
    axes = resolved.mesh_axes
    fits = ' or '.join(map(str, _sizes_that_fit(shape[dim], ways)))
    named = isinstance(resolved.name, str)
    instead = f'({resolved.name!r}, None) in place of the rule' if named else 'None for it'
    return Problem(
        'indivisible',
        f'dimension {dim}{f" ({resolved.name!r})" if named else ""} of shape {tuple(shape)}: '
        f'{shape[dim]} does not divide by {ways}, the size of mesh '
        f'{"axes" if isinstance(axes, tuple) else "axis"} {axes!r}. Use {fits}, another mesh, '
        f"{instead}, or on_indivisible='replicate', 'drop_axis' or 'pad'.",
    )


def check_layout(spec: PartitionSpec, mesh: MeshLike, where: str, shape: Sequence[int]) -> None:
    """Raises ValueError for a spec that an array of this shape cannot have on the mesh.

    As `check_spec`, and for sizes that their mesh axes do not divide.
    """
    check_spec(spec, mesh, where, shape)
    sizes = axis_sizes(mesh)
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=False)):
        ways = math.prod(sizes[axis] for axis in sharded_over(axes))
        if size % ways:
            fits = ' or '.join(map(str, _sizes_that_fit(size, ways)))
            raise ValueError(
                f'{where}: {spec_str(spec)}: dimension {dim} of shape {tuple(shape)}: {size} does '
                f'not divide by {ways}, the size of {axes!r} on the mesh {describe_axes(sizes)}. '
                f'Use {fits}, another mesh, or None for it'
            )


def give_way(
    resolved: ResolvedDimension,
    size: int,
    ways: int,
    sizes: Mapping[str, int],
    policy: OnIndivisible,
) -> ResolvedDimension:
    """A dimension of a size that its `ways` do not divide, as the policy lays it out."""
    wanted = sharded_over(resolved.mesh_axes)
    kept = _that_divide(size, wanted, sizes) if policy == 'drop_axis' else ()
    fits = _sizes_that_fit(size, ways)
    why = f'size {size} does not divide by {ways}'
    reason = {
        'replicate': why,
        'drop_axis': f'{why}: gave up {", ".join(a for a in wanted if a not in kept)}',
        'pad': f'{why}: whole here, padded to {fits[-1]} inside partitioned functions',
    }[policy]
    decides = bool(kept) or policy == 'pad'
    rule = resolved.rule or (str(resolved.name), resolved.mesh_axes)
    return dataclasses.replace(
        resolved,
        mesh_axes=kept[0] if len(kept) == 1 else kept or None,
        rule=resolved.rule if decides else None,
        lost=resolved.lost if decides else (*resolved.lost, (rule, why)),
        reason=reason,
        policy=policy,
        fits=fits,
    )


def _that_divide(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Those of the axes that together split the size the most; of equals the most, the first."""
    subsets = (c for n in range(len(axes), -1, -1) for c in itertools.combinations(axes, n))

    def ways(subset: tuple[str, ...]) -> int:
        return math.prod(sizes.get(axis, 1) for axis in subset)

    return max((s for s in subsets if size % ways(s) == 0), key=ways)
