"""What remains of a spec, and of rules, inside a `jax.shard_map`.

A shard_map makes some or all mesh axes Manual. Its function sees one shard of each array along
them, so a layout inside can use only the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from partitioning.rules.axes import MeshLike, as_tuple, from_tuple, sharding_axes
from partitioning.rules.names import AxisRules, LogicalAxisRules
from partitioning.rules.resolve import resolve_axes


def manual_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The Manual axes of a mesh, in its order."""
    typed = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in typed if kind == AxisType.Manual)


def free_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh that no surrounding `jax.shard_map` has made Manual, in its order."""
    manual = manual_axes(mesh)
    return tuple(axis for axis in mesh.axis_names if axis not in manual)


def drop_axes(spec: PartitionSpec, dropped: Set[str]) -> PartitionSpec:
    """A spec without some mesh axes."""
    return PartitionSpec(*(_without(entry, dropped) for entry in spec))


def drop_axes_of_names(
    names: Sequence[Any], rules: LogicalAxisRules, mesh: MeshLike, dropped: Set[str]
) -> tuple[tuple[Any, ...], AxisRules]:
    """Names and rules that resolve to what the given ones resolve to, without some mesh axes.

    The given rules are resolved with all mesh axes, because a Manual axis is still taken: the same
    rules win inside a shard_map and outside.

    Args:
      names: logical names or tuples of mesh axes, as for `resolve_axes`.
      rules: the logical axis rules.
      mesh: the mesh, with the axes that are dropped.
      dropped: the mesh axes to drop.

    Returns:
      The names without the dropped axes, and one rule per logical name, with the same policies.

    Raises:
      ValueError: if `resolve_axes` raises it.
    """
    resolved = resolve_axes(names, rules, mesh=mesh)
    left = [(d.name, _without(d.mesh_axes, dropped)) for d in resolved if isinstance(d.name, str)]
    kept = tuple(_without(name, dropped) if isinstance(name, tuple) else name for name in names)
    return kept, AxisRules(rules).with_rules(left)


def _without(entry: Any, dropped: Set[str]) -> Any:
    """One entry of a spec without some mesh axes; None and UNCONSTRAINED stay."""
    if not dropped & {*sharding_axes(entry)}:
        return entry
    return from_tuple([axis for axis in as_tuple(entry) if axis not in dropped])
