"""The one type for a laid-out state: every array with its spec and reasons, on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from partitioning.hardware import CompilerOption
from partitioning.plan.audit import Audit, audit_rows, check_fixed_point
from partitioning.plan.findings import Finding, row_findings, rule_findings
from partitioning.plan.layouts import RuleSet
from partitioning.plan.plan_file import from_json, to_json
from partitioning.plan.rows import PlanRow, check_layout_of, nearest_path, shard_shape
from partitioning.plan.tables import count, row_table
from partitioning.rules import (
    AxisNames,
    MeshLike,
    Spec,
    axis_sizes,
    boundary_spec,
    describe_axes,
    to_spec,
)
from partitioning.short_help import ShortHelp
from partitioning.state import unbox
from partitioning.state.traversal import StateTree
from partitioning.tracebacks import hide_own_frames


class Unplanned(NamedTuple):
    """A node of the state that is not one array: a subtree, or a missing array.

    The names are the logical axes that the state gives it. The spec is None if it gives none.
    """

    names: AxisNames
    spec: Spec | None


class InitProgram(NamedTuple):
    """A traced function that makes the state of a plan.

    Attributes:
      jit_for: returns the jitted function that makes the state in the layout of a plan, over Auto
        axes, for arguments like these.
      finish: moves the state that it made to the axes of the mesh.
      named_state: the state as ShapeDtypeStructs, with its boxes.
    """

    jit_for: Callable[..., Any]
    finish: Callable[[Plan, Any], Any]
    named_state: Any

    @property
    def abstract_state(self) -> Any:
        """The state as ShapeDtypeStructs, without boxes."""
        return unbox(self.named_state)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(metaclass=ShortHelp):
    """The layout of every array of a state on a mesh, with the reasons.

    Usage:
      plan = partitioner.plan(init, key)  # traces init once
      print(plan)
      state = plan.init(key)  # created in its shards
      step = partitioner.partition(step, (plan.specs, None), (plan.specs, None))

    Two plans are equal if their meshes have the same axes, and they have the same rows and compiler
    options. A pickle of a plan is like its file: it holds the sizes of the axes, the rows, the
    compiler options and the rules.

    Attributes:
      mesh: the mesh, or the size of each of its axes if the plan comes from a file.
      rows: one row per array.
      tree: the structure of the state; None if the plan is not of a state that is here.
      rules: the rules that made the plan; None if it was not made by rules.
      program: makes the state; None unless the plan was made from an init function.
      compiler_options: the options with which the programs of a run are compiled, as a trainer
        records them. `partition` takes them as `option_values(plan.compiler_options)`.
      specs, shardings, logical_axes: the state with a PartitionSpec (or PaddedSpec), a
        NamedSharding or AxisNames in place of every array.
      abstract_state: the state as ShapeDtypeStructs with their shardings, without boxes.
      bytes_total, bytes_per_device: the size of all global arrays, and what one device holds.
    """

    mesh: MeshLike
    rows: tuple[PlanRow, ...]
    tree: StateTree[PlanRow | Unplanned] | None = None
    rules: RuleSet | None = None
    program: InitProgram | None = None
    compiler_options: tuple[CompilerOption, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, 'rows', tuple(self.rows))
        if len({row.path for row in self.rows}) < len(self.rows):
            paths = [row.path for row in self.rows]
            twice = next(path for path in paths if paths.count(path) > 1)
            raise ValueError(f'two arrays of the plan have the path {twice}: rename one of them')

    # The state, as trees.

    @property
    def specs(self) -> Any:
        """The state with a PartitionSpec (or PaddedSpec) in place of every array."""
        return self._tree().map(lambda x: x.spec)

    @property
    def shardings(self) -> Any:
        """The state with a NamedSharding in place of every array.

        Raises:
          ValueError: if the plan has only the sizes of mesh axes.
        """
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise ValueError(
                'this plan has the sizes of its mesh axes but no mesh: use '
                'PjitPartitioner(mesh, plan).plan(init, key)'
            )
        sharding = functools.cache(functools.partial(NamedSharding, self.mesh))
        return self._tree().map(lambda x: sharding(boundary_spec(x.spec) or PartitionSpec()))

    @property
    def logical_axes(self) -> Any:
        """The state with AxisNames in place of every array."""
        return self._tree().map(lambda x: x.names if isinstance(x, Unplanned) else x.logical_axes)

    @property
    def abstract_state(self) -> Any:
        """The state as ShapeDtypeStructs with their shardings, without boxes.

        Raises:
          ValueError: if the plan was not made from an init function.
        """
        abstract = self._program().abstract_state

        def place(s: NamedSharding, arrays: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays
            )

        return jax.tree.map(place, self.shardings, abstract)

    @hide_own_frames
    def init(self, *args: Any) -> Any:
        """Makes the state. Each array is created in its shards, never whole on one device.

        The arguments have the shapes and dtypes that the state was planned for; it has no linen
        boxes.

        Raises:
          ValueError: if the plan was not made from an init function, or if the arguments differ.
        """
        program = self._program()
        return program.finish(self, program.jit_for(self, *args)(*args))

    def compile_init(self, *args: Any) -> Callable[..., Any]:
        """Compiles what `init` runs, so that a program can do so while it compiles something else.

        It takes and raises what `init` does. The result takes such arguments and returns
        the state.
        """
        program = self._program()
        compiled = program.jit_for(self, *args).lower(*args).compile()
        return lambda *arrays: program.finish(self, compiled(*arrays))

    # What the plan says.

    def audit(self, state: Any = None, *, budget: float | None = None) -> Audit:
        """What every device holds of the state, what is replicated, and why.

        Args:
          state: the state, whose layouts are compared with the plan; by default only the plan is
            audited.
          budget: the most bytes that one device may hold.

        Raises:
          ValueError: if a device holds more than `budget`, or if `state` is another state.
        """
        return audit_rows(self.rows, self.mesh, state, budget=budget)

    def lint(self) -> tuple[Finding, ...]:
        """Everything that is suspicious in the rules and rows of the plan."""
        found = [*row_findings(self.rows, self.rules)]
        if self.rules is not None:
            found += rule_findings(self.rules, self.mesh, self.rows)
        return tuple(dict.fromkeys(found))

    def check(self, state: Any) -> None:
        """Checks that the arrays of a state are laid out as in the plan.

        Raises:
          ValueError: with the path of the first array that is laid out differently.
        """
        check_fixed_point(state, self.shardings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file; see `partitioning.plan.plan_file` for the format."""
        _file(path).write_text(to_json(self.rows, self.mesh, self.compiler_options))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan of a file, which may be in a store, as in `gs://` and `s3://`.

        Raises:
          OSError: if there is no such file, or if it cannot be read.
          ValueError: if the file is not a plan, if its figures contradict its specs, or if the
            package for its store is not installed.
        """
        try:
            rows, mesh, options = from_json(_file(path).read_text())
            return cls(mesh, rows, compiler_options=options)
        except UnicodeDecodeError:
            raise ValueError(
                f'{path}: the file is not a text. Make it again with plan.save(path)'
            ) from None
        except (ValueError, ImportError) as error:
            raise ValueError(f'{path}: {error}') from None

    def replace_specs(self, specs: Mapping[str, Spec], reason: str) -> Plan:
        """The plan with other specs for some arrays.

        `specs` are by path, and the reason is for each of their dimensions.

        Raises:
          ValueError: if the plan lacks a path, or a spec does not fit its array.
        """
        changed = {}
        for path, spec in specs.items():
            if path not in self._by_path:
                raise ValueError(self._lack(path))
            row = self[path]
            check_layout_of(path, row.shape, spec, self.mesh)
            both: Any = boundary_spec(spec), getattr(spec, 'inside', spec)
            entries = [[*s, *[None] * (len(row.shape) - len(s))] for s in both]
            dimensions = tuple(
                dataclasses.replace(
                    d,
                    mesh_axes=outside,
                    wanted=inside,
                    reason=reason,
                    policy=None if outside == inside else 'pad',
                )
                for d, outside, inside in zip(row.dimensions, *entries, strict=True)
            )
            changed[path] = row._replace(
                dimensions=dimensions,
                spec=to_spec(dimensions),
                shard_shape=shard_shape(row.shape, dimensions, self.mesh),
            )

        def swap(x: Any) -> Any:
            return changed.get(x.path, x) if isinstance(x, PlanRow) else x

        tree = self.tree and dataclasses.replace(
            self.tree, leaves=tuple(map(swap, self.tree.leaves))
        )
        return dataclasses.replace(self, rows=tuple(map(swap, self.rows)), tree=tree)

    @property
    def bytes_total(self) -> int:
        """The size of all global arrays, in bytes."""
        return sum(row.bytes_total for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """What one device holds of all arrays, in bytes."""
        return sum(row.bytes_per_device for row in self.rows)

    def __getitem__(self, path: str) -> PlanRow:
        if path not in self._by_path:
            raise KeyError(self._lack(path))
        return self._by_path[path]

    def _lack(self, path: str) -> str:
        return f'{path} is not in the plan.{nearest_path(path, self.rows)}'

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        axes = list(axis_sizes(self.mesh).items()), list(axis_sizes(other.mesh).items())
        of_layout = axes[0] == axes[1] and self._by_path == other._by_path
        return of_layout and self.compiler_options == other.compiler_options

    def __hash__(self) -> int:
        return hash((tuple(axis_sizes(self.mesh).items()), frozenset(self._by_path)))

    # A plan never changes, so a copy of one is itself.

    def __deepcopy__(self, memo: Any = None) -> Plan:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        """A pickle holds what a plan file holds, and the rules, but no devices and no program."""
        axes = dict(axis_sizes(self.mesh))
        return type(self), (axes, self.rows, None, self.rules, None, self.compiler_options)

    def __repr__(self) -> str:
        arrays, mesh = count(len(self.rows), 'array'), describe_axes(self.mesh)
        return f'<Plan of {arrays} for the mesh {mesh}: {self.bytes_per_device:,} bytes per device>'

    def __str__(self) -> str:
        head = ('array', 'shape', 'spec', 'shard shape', 'bytes per device', 'reason')
        total = (
            f'{count(len(self.rows), "array")}, {self.bytes_total:,} bytes; '
            f'{self.bytes_per_device:,} bytes per device of the mesh {describe_axes(self.mesh)}'
        )
        options = [f'compiler option {option}' for option in self.compiler_options]
        return '\n'.join([*row_table(self.rows, head), '', total, *options])

    @functools.cached_property
    def _by_path(self) -> dict[str, PlanRow]:
        return {row.path: row for row in self.rows}

    def _tree(self) -> StateTree[PlanRow | Unplanned]:
        if self.tree is None:
            raise ValueError(
                'this plan lists arrays but does not know the structure of the state: use '
                'PjitPartitioner(mesh, plan).plan(init, key)'
            )
        return self.tree

    def _program(self) -> InitProgram:
        if self.program is None:
            if self.tree is None:
                raise ValueError(
                    'this plan lists arrays and does not hold the init function: use '
                    'PjitPartitioner(mesh, plan).plan(init, key), which keeps its layout'
                )
            raise ValueError(
                'this plan was not made from an init function: use partitioner.plan(init, key)'
            )
        return self.program


def _file(path: str | os.PathLike[str]) -> Any:
    """The file with this path, local or in a store."""
    if '://' not in os.fspath(path):
        return Path(path)
    from etils import epath  # flax depends on it

    return epath.Path(path)
