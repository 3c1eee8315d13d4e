"""Partitioners on jax.jit: a mesh, rules, and functions partitioned by them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
from absl import logging
from jax.sharding import AxisType, Mesh

from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.layout import LocalChunker
from partitioning.mesh import AxisTypes, default_mesh
from partitioning.partitioner.base import BasePartitioner
from partitioning.partitioner.padding import has_padded, pad_inside
from partitioning.partitioner.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    partition_function,
    to_shardings,
)
from partitioning.plan.audit import Audit, audit_state
from partitioning.plan.findings import Finding, lint
from partitioning.plan.rule_set import ResolvedState, RuleSet, resolve_state
from partitioning.rules import (
    STANDARD_MESH_AXES,
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    OnIndivisible,
    OnUnmatched,
    as_tuple,
    logical_to_mesh_axes,
    nearest,
    standard_logical_axis_rules,
)
from partitioning.state import PathRules, check_path_rules, get_logical_axes, unbox


class Plan(Protocol):
    """What a partitioner asks of a `partitioning.plan.ResolvedPlan`."""

    def resolve_state(self, state: Any, mesh: Mesh) -> ResolvedState: ...


class BasePjitPartitioner(BasePartitioner):
    """A partitioner on `jax.jit`, without logical axis rules."""

    @functools.cached_property
    def _local_chunker(self) -> LocalChunker:
        return LocalChunker(self.mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        if self._given_mesh is not None:
            return self._given_mesh
        return default_mesh(**self._mesh_settings)

    @property
    def logical_axis_rules(self) -> LogicalAxisRules:
        """The rules that functions are traced under."""
        return ()

    def resolve(self, train_state: Any) -> ResolvedState:
        raise ValueError(
            f'{type(self).__name__} has no logical axis rules to map a state by: use '
            'PjitPartitioner'
        )

    def partition(
        self,
        fn: Callable[..., Any],
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> PartitionedCallable:
        static = _as_indices(static_argnums)
        if isinstance(in_axis_resources, list):
            in_axis_resources = tuple(in_axis_resources)
        if has_padded((in_axis_resources, out_axis_resources)):
            if AxisType.Explicit in self.mesh.axis_types:
                raise ValueError(
                    "a PaddedSpec needs Auto mesh axes, not Explicit ones: choose 'drop_axis'"
                )
            fn = pad_inside(fn, in_axis_resources, out_axis_resources, static)
        return partition_function(
            fn,
            self.mesh,
            self.logical_axis_rules,
            in_shardings=to_shardings(in_axis_resources, self.mesh),
            out_shardings=to_shardings(out_axis_resources, self.mesh),
            static_argnums=static,
            donate_argnums=_as_indices(donate_argnums),
        )

    def compile(
        self, partitioned_fn: PartitionedCallable, *args: Any
    ) -> CompiledPartitionedCallable:
        return partitioned_fn.lower(*args).compile()


class PjitPartitioner(BasePjitPartitioner):
    """A partitioner by logical axis rules, on `jax.jit`.

    Usage:
      partitioner = PjitPartitioner(num_partitions=2)
      state = partitioner.init(init, key)  # born sharded
      axes = partitioner.get_mesh_axes(partitioner.eval_shape(init, key))
      step = partitioner.partition(
          step, (axes, partitioner.data_partition_spec), (axes, None), donate_argnums=0)
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        *,
        devices: Sequence[JaxDevice] | None = None,
        mesh_axis_names: Sequence[str] | None = None,
        axis_types: AxisTypes = AxisType.Auto,
        granule_size: int | None = None,
        mesh: Mesh | None = None,
        optimizer_axis_rules: LogicalAxisRules | None = None,
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
        params_axes_names_override: PathRules = (),
        plan: Plan | None = None,
    ):
        """Args as those of BasePartitioner, and:
        logical_axis_rules: (logical axis, mesh axis or axes or None) pairs in order of priority; by
          default `standard_logical_axis_rules` for the axes of the mesh. Where the partitioner
          makes an axis for the slices, a rule of 'batch' that has 'data' gets that axis too.
        optimizer_axis_rules: those of what the optimizer keeps, where they differ, as
          `fsdp_logical_axis_rules` makes them for ZeRO.
        on_unmatched: what becomes of names without a rule, in both sets of rules; by default what
          the rules themselves say (`AxisRules`), or an error; see `resolve_axes`.
        on_indivisible: the same of sizes that their mesh axes do not divide.
        params_axes_names_override: (regular expression, names) pairs that name parameters by their
          paths, such as 'decoder/mlp/kernel'; see `override_params_axes_names`.
        plan: a `partitioning.plan.ResolvedPlan`, such as load_plan reads: the layout of the
          state, whatever the rules say; the rules lay out the batch and activations.
        """
        super().__init__(
            num_partitions=num_partitions,
            model_parallel_submesh=model_parallel_submesh,
            params_on_devices=params_on_devices,
            backend=backend,
            ici_mesh_shape=ici_mesh_shape,
            dcn_mesh_shape=dcn_mesh_shape,
            devices=devices,
            mesh_axis_names=mesh_axis_names,
            axis_types=axis_types,
            granule_size=granule_size,
            mesh=mesh,
        )
        self._as_rules = functools.partial(
            AxisRules, on_unmatched=on_unmatched, on_indivisible=on_indivisible
        )
        self._as_rules(())  # rules that the mesh decides come later, the policies are known now
        self._given_rules = None
        if logical_axis_rules is not None:
            self._given_rules = self._as_rules(logical_axis_rules)
        self._optimizer_rules = None
        if optimizer_axis_rules is not None:
            self._optimizer_rules = self._as_rules(optimizer_axis_rules)
        self._overrides = check_path_rules(params_axes_names_override)
        beside = {
            'params_axes_names_override': params_axes_names_override,
            'optimizer_axis_rules': optimizer_axis_rules,
        }
        given = [name for name, value in beside.items() if value]
        if plan is not None and given:
            raise ValueError(f'plan decides what {", ".join(given)} would: leave out')
        if plan is not None and not hasattr(plan, 'resolve_state'):
            raise ValueError(
                f'plan= takes a ResolvedPlan, not a {type(plan).__name__}: give '
                'plan.resolve(params, mesh), or load_plan(path)'
            )
        self._plan = plan

    @functools.cached_property
    def logical_axis_rules(self) -> AxisRules:
        if self._given_rules is None:
            # None that leave an axis unused: with no rules get_mesh_axes and constrain raise.
            axes = self._axes_in_use
            known = set(axes) <= set(STANDARD_MESH_AXES)
            return self._as_rules(standard_logical_axis_rules(mesh_axes=axes) if known else ())
        if self._given_mesh is not None:
            return self._given_rules
        slices = self._axis_of_slices
        return self._given_rules.with_rules(
            [_over_slices(rule, slices) for rule in self._given_rules]
        )

    def with_rules(self, logical_axis_rules: LogicalAxisRules) -> Self:
        """The same partitioner with other rules: its class, mesh, plan and policies stay.

        Args:
          logical_axis_rules: as of the constructor.
        """
        rules = self._as_rules(logical_axis_rules)
        kept = {'mesh': self.mesh, '_local_chunker': self._local_chunker}
        other = copy.copy(self)
        for name in list(vars(other)):
            # Whatever else is cached, a subclass's too, may have been made of the rules.
            if name not in kept and isinstance(
                getattr(type(self), name, None), functools.cached_property
            ):
                delattr(other, name)
        other._given_rules = rules
        return other

    @property
    def _axes_in_use(self) -> list[str]:
        sizes = self.mesh.shape
        return [a for a in self.mesh.axis_names if sizes[a] > 1 or a in STANDARD_MESH_AXES]

    @functools.cached_property
    def _data_axis(self) -> MeshAxes:
        self._check_default_rules()
        self._check_batch_rule()
        batch = logical_to_mesh_axes(
            ['batch'], self.logical_axis_rules, mesh=self.mesh, on_unmatched='replicate'
        )
        axes = batch[0] if batch else None
        if (slices := self._axis_of_slices) is not None and slices not in as_tuple(axes):
            logging.warning(
                "'batch' is sharded over %s: each of the %d parts of %r computes the same rows",
                axes,
                self.mesh.shape[slices],
                slices,
            )
        return axes

    def _check_batch_rule(self) -> None:
        """Rules without one for 'batch' may be meant; one for a name close to it is not."""
        names = {name for name, _ in self.logical_axis_rules}
        if 'batch' in names or self.mesh.size == 1:
            return
        if hint := nearest('batch', names):
            raise ValueError(
                f"no rule for 'batch', so each device would compute all rows.{hint} Write "
                "('batch', 'data'), or ('batch', None) to mean it"
            )
        logging.warning("no rule for 'batch': each device computes all rows of it")

    def _check_default_rules(self) -> None:
        """Rules that were not chosen must not leave a mesh axis without use."""
        if self._given_rules is None and self._plan is None:
            standard_logical_axis_rules(mesh_axes=self._axes_in_use)

    @functools.cached_property
    def rule_set(self) -> RuleSet:
        """The rules for parameters and optimizer, and their policies."""
        return RuleSet(
            rules=self.logical_axis_rules,
            optimizer_rules=self._optimizer_rules,
            overrides=self._overrides,
        )

    def resolve(self, train_state: Any) -> ResolvedState:
        if self._plan is not None:
            return self._plan.resolve_state(train_state, self.mesh)
        self._check_default_rules()
        return resolve_state(train_state, self.rule_set, self.mesh)

    def get_logical_axes(self, train_state: Any) -> Any:
        if self._plan is not None:
            return self.resolve(train_state).logical_axes
        return get_logical_axes(train_state, self.rule_set.overrides)

    def eval_shape(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The result of a function as ShapeDtypeStructs, boxes and names included.

        As `jax.eval_shape`, inside the mesh and the rules, which nnx modules ask for.
        """
        return self._partition_over_auto(fn, None).eval_shape(*args)

    def _partition_over_auto(self, fn: Callable[..., Any], out_axes: Any) -> PartitionedCallable:
        """A function of replicated arguments over the mesh with all of its axes Auto.

        Where axes are Explicit, jax lays out what a function makes by what it is made of: all of a
        state that is made of a random key would be whole on every device.
        """
        mesh = Mesh(self.mesh.devices, self.mesh.axis_names)
        return partition_function(
            fn,
            mesh,
            self.logical_axis_rules,
            in_shardings=to_shardings(None, mesh),
            out_shardings=to_shardings(out_axes, mesh),
        )

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """A train state whose every array is born in its shards, never whole on one device.

        Args:
          init_fn: makes the state of `args`, its parameters named as `resolve` needs them. It is
            traced inside the mesh and the rules.
          *args: of `init_fn`, replicated over the mesh.

        Returns:
          The state, without linen boxes.
        """
        resolved = self.resolve(self.eval_shape(init_fn, *args))
        # Steps have no weak types, and would be compiled again after a state that has some.
        state = self._partition_over_auto(
            lambda *a: jax.tree.map(_strongly_typed, unbox(init_fn(*a))), resolved.mesh_axes
        )(*args)
        if AxisType.Explicit not in self.mesh.axis_types:
            return state
        return jax.device_put(state, resolved.shardings)

    def audit(self, train_state: Any, named: Any = None, *, budget: float | None = None) -> Audit:
        """What every device holds of a state, what is replicated, and why.

        Args:
          train_state: a pytree of arrays or ShapeDtypeStructs. What arrays are laid out as is
            taken from themselves; what they should be, from the rules.
          named: the state with its names, where `train_state` has none any more:
            `partitioner.eval_shape(init, key)`.
          budget: bytes that one device may hold.

        Raises:
          ValueError: a device holds more than `budget`; or as `resolve`.
        """
        resolved = self.resolve(train_state if named is None else named)
        return audit_state(train_state, resolved, budget=budget)

    def lint(self, train_state: Any = None) -> tuple[Finding, ...]:
        """Everything that is wrong or suspicious with the rules, for the mesh and a state."""
        found = lint(
            self.logical_axis_rules,
            self.mesh,
            train_state if self._plan is None else None,  # the rules are for other arrays then
            optimizer_axis_rules=self._optimizer_rules,
            params_axes_names_override=self._overrides,
        )
        if self._given_rules is not None:
            return found
        found = tuple(finding for finding in found if finding.kind != 'unused')  # not chosen
        try:
            self._check_default_rules()
        except ValueError as error:
            return Finding('error', 'rules', 'the default rules', str(error)), *found
        return found


def _strongly_typed(x: Any) -> Any:
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, 'weak_type', False) else x


def _over_slices(rule: tuple[str, MeshAxes], slices: str | None) -> tuple[str, MeshAxes]:
    """The rule of the batch with the axis of the slices before its own."""
    name, axes = rule[0], as_tuple(rule[1])
    if name != 'batch' or slices is None or slices in axes or 'data' not in axes:
        return rule
    return name, (slices, *axes)


def _as_indices(indices: int | Sequence[int]) -> tuple[int, ...]:
    return (indices,) if isinstance(indices, int) else tuple(indices)
