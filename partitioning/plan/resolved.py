"""A plan with every decision made: one row for each array, which a reviewer can read."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from partitioning.plan.matching import rows_of
from partitioning.plan.rows import (
    PlannedArray,
    logical_only,
    path_rule,
    planned_array,
    reason_of,
)
from partitioning.plan.rule_set import ResolvedState, RuleSet, resolve_state
from partitioning.plan.tables import shape_str, text_table
from partitioning.rules import (
    AxisRules,
    MeshLike,
    OnIndivisible,
    axis_sizes,
    describe_axes,
    nearest,
    spec_str,
)
from partitioning.state import PathRules, key_names, shape_of
from partitioning.state.boxes import array_of, is_carrier, is_metadata


@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """The layout of every array, decided for meshes of one shape; see `to_json`.

    Usage:
      plan = ShardingPlan({'fc1/kernel': PartitionSpec(None, 'model')}).resolve(params, mesh)
      print(plan)
      partitioner = PjitPartitioner(mesh=mesh, plan=plan)

    Attributes:
      mesh: the size of each mesh axis, in the order of the mesh.
      arrays: a row for each array, by path.
    """

    mesh: Mapping[str, int]
    arrays: tuple[PlannedArray, ...]

    def __post_init__(self) -> None:
        # Ordered ones are equal only in the same order, as the files of plans are.
        object.__setattr__(self, 'mesh', collections.OrderedDict(axis_sizes(self.mesh)))
        rows = sorted(self.arrays, key=lambda row: row.path.split('/'))
        object.__setattr__(self, 'arrays', tuple(rows))
        for row, following in itertools.pairwise(rows):
            if row.path == following.path:
                raise ValueError(f'two arrays of the plan have the path {row.path}')

    @classmethod
    def of(cls, resolved: ResolvedState) -> ResolvedPlan:
        """The plan that logical axis rules make: of what `PjitPartitioner.resolve` returns."""
        rows = []
        for x in resolved.arrays:
            leaf, spec = x.leaf, PartitionSpec() if x.spec is None else x.spec
            if leaf.array is None:
                continue  # a state that names axes of what is not there
            follows = leaf.parameter is not None
            reason = reason_of(x.dimensions) if follows or not leaf.dims else 'it has no names'
            rows.append(
                planned_array(
                    '/'.join(leaf.path),
                    leaf.array,
                    spec,
                    resolved.mesh,
                    logical_axes=logical_only(leaf.names) if follows else None,
                    category=leaf.role,
                    reason=reason,
                )
            )
        return cls(axis_sizes(resolved.mesh), tuple(rows))

    @property
    def bytes_per_device(self) -> int:
        """What one device holds of all arrays."""
        return sum(row.bytes_per_device for row in self.arrays)

    @property
    def bytes_total(self) -> int:
        """Of the global arrays."""
        return sum(row.bytes_total for row in self.arrays)

    def __getitem__(self, path: str) -> PlannedArray:
        if path not in self._by_path:
            raise KeyError(f'{path} is not in the plan.{nearest(path, self._by_path)}')
        return self._by_path[path]

    @functools.cached_property
    def _by_path(self) -> dict[str, PlannedArray]:
        return {row.path: row for row in self.arrays}

    @property
    def path_rules(self) -> PathRules:
        """The layouts as `params_axes_names_override` of a partitioner takes them.

        What an optimizer keeps is left to follow the parameters. Where an array is to be padded
        the partitioner needs on_indivisible='pad'.
        """
        rows = (row for row in self.arrays if row.category == 'parameters' or row.shape)
        return tuple(path_rule(row.path, row) for row in rows if row.category != 'optimizer')

    def resolve_state(self, state: Any, mesh: Mesh) -> ResolvedState:
        """The layout of a train state whose parameters are those of the plan.

        Args:
          state: a pytree, abstract or not: the parameters, or all of a state with what the
            optimizer keeps. That is as the plan says where it says so, and follows the parameters
            where it is of parameters alone.
          mesh: one of the plan's shape.

        Raises:
          ValueError: another mesh; other parameters, shapes or types.
        """
        self.check_mesh(mesh)
        flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_carrier)
        rows = rows_of([(key_names(path), x) for path, x in flat], self.arrays)
        padded = any(row.padded_spec is not None for row in self.arrays)
        policy: OnIndivisible = 'pad' if padded else 'error'
        overrides = tuple(
            path_rule('/'.join(path), row)
            for path, row in rows.items()
            if row.category == 'parameters' or (row.category == 'other' and row.shape)
        )
        rules = RuleSet(rules=AxisRules((), on_indivisible=policy), overrides=overrides)
        resolved = resolve_state(state, rules, mesh)

        def as_planned(x: Any) -> Any:
            row = None if is_metadata(x) else rows.get(x.leaf.path)
            return x if row is None else x._replace(spec=row.mesh_axes)

        return dataclasses.replace(resolved, leaves=tuple(map(as_planned, resolved.leaves)))

    def check_mesh(self, mesh: MeshLike) -> None:
        """Raises ValueError unless the mesh has the axes that the plan is for, in their sizes."""
        sizes = axis_sizes(mesh)
        if dict(sizes) != dict(self.mesh):
            raise ValueError(
                f'the plan is for the mesh {describe_axes(self.mesh)}, not {describe_axes(sizes)}: '
                'resolve it again for this one'
            )

    def mesh_axes(self, state: Any) -> Any:
        """The tree of a state with the PartitionSpec of each of its arrays.

        Args:
          state: a pytree of just the arrays of the plan, abstract or not.

        Raises:
          ValueError: an array that the plan lacks, one that it has more, or another shape.
        """
        rows = {row.path: row for row in self.arrays}

        def spec(path: Any, x: Any) -> Any:
            if is_metadata(x):
                return x
            name, shape = '/'.join(key_names(path)), shape_of(array_of(x))
            if name not in rows:
                raise ValueError(f'{name} is not in the plan.{nearest(name, rows)}')
            row = rows.pop(name)
            if row.shape != shape:
                raise ValueError(f'{name} has shape {shape}, but {row.shape} in the plan')
            return row.mesh_axes

        specs = jax.tree_util.tree_map_with_path(spec, state, is_leaf=is_carrier)
        if rows:
            raise ValueError(f'{_count(len(rows))} of the plan not there, {next(iter(rows))} first')
        return specs

    def __str__(self) -> str:
        head = ('array', 'shape', 'spec', 'shard shape', 'bytes per device', 'reason')
        rows = [
            (
                row.path,
                shape_str(row.shape),
                spec_str(row.spec) + _padded_str(row),
                shape_str(row.shard_shape),
                f'{row.bytes_per_device:,}',
                row.reason,
            )
            for row in self.arrays
        ]
        total = (
            f'{_count(len(self.arrays))}, {self.bytes_total:,} bytes; {self.bytes_per_device:,} '
            f'bytes per device of the mesh {describe_axes(self.mesh)}'
        )
        return '\n'.join([*text_table(head, rows), '', total])


def _count(arrays: int) -> str:
    return f'{arrays} array{"s" if arrays != 1 else ""}'


def _padded_str(row: PlannedArray) -> str:
    return '' if row.padded_spec is None else f', inside {spec_str(row.padded_spec)}'
