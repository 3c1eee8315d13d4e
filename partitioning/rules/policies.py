"""The policies for a size that its mesh axes do not divide."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from partitioning.rules.axes import MeshLike, axis_sizes, from_tuple, num_shards, sharding_axes
from partitioning.rules.checks import Problem, indivisible, sizes_that_fit
from partitioning.rules.dimensions import ResolvedDimension
from partitioning.rules.names import OnIndivisible


def apply_policies(
    resolved: list[ResolvedDimension],
    shape: Sequence[int],
    mesh: MeshLike,
    policy: OnIndivisible,
) -> Iterator[Problem]:
    """Applies a policy, in place, to the dimensions whose size is not divisible.

    Args:
      resolved: the dimensions of an array.
      shape: the global shape of the array.
      mesh: the mesh. Axes that it lacks are ignored, because they are another problem.
      policy: the policy. Under 'error', each such size is a problem.
    """
    sizes = axis_sizes(mesh)
    for dim, one in enumerate(resolved):
        axes = [axis for axis in sharding_axes(one.mesh_axes) if axis in sizes]
        if shape[dim] % num_shards(axes, sizes) == 0:
            continue
        if policy == 'error':
            name = one.name if isinstance(one.name, str) else None
            policies = ('replicate', 'drop_axis', 'pad')
            yield indivisible(dim, shape, axes, sizes, name=name, policies=policies)
        else:
            resolved[dim] = apply_policy(one, shape[dim], sizes, policy)


def apply_policy(
    resolved: ResolvedDimension, size: int, mesh: MeshLike, policy: OnIndivisible
) -> ResolvedDimension:
    """Applies a policy to a dimension whose size is not divisible by its number of shards.

    Args:
      resolved: the dimension as the rules lay it out.
      size: the size of the dimension.
      mesh: the mesh.
      policy: 'replicate', 'drop_axis' or 'pad'; see `resolve_axes`.
    """
    wanted = sharding_axes(resolved.mesh_axes)
    shards = num_shards(wanted, mesh)
    kept = largest_divisor(size, wanted, mesh) if policy == 'drop_axis' else ()
    fits = sizes_that_fit(size, shards)
    why = f'size {size} is not divisible by {shards}'
    dropped = ', '.join(axis for axis in wanted if axis not in kept)
    reason = {
        'replicate': f'{why}, so it is replicated',
        'drop_axis': f'{why}, so it is not sharded over {dropped}',
        'pad': f'{why}, so it is whole here and padded to {fits[-1]} inside partitioned functions',
    }[policy]
    decides = bool(kept) or policy == 'pad'
    rule = resolved.rule or (str(resolved.name), resolved.mesh_axes)
    return dataclasses.replace(
        resolved,
        mesh_axes=from_tuple(kept),
        rule=resolved.rule if decides else None,
        lost=resolved.lost if decides else (*resolved.lost, (rule, why)),
        reason=reason,
        policy=policy,
        fits=fits,
    )


def largest_divisor(size: int, axes: tuple[str, ...], mesh: MeshLike) -> tuple[str, ...]:
    """The subset of the axes that divides a size into the most shards.

    Among equals, the largest subset wins, and then the first.
    """
    subsets = (c for n in range(len(axes), -1, -1) for c in itertools.combinations(axes, n))
    dividing = (subset for subset in subsets if size % num_shards(subset, mesh) == 0)
    return max(dividing, key=lambda subset: num_shards(subset, mesh))
