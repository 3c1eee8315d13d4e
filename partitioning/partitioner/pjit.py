"""Partitioners on jax.jit: a mesh, rules, and the plans and functions that they make."""

from __future__ import annotations

import copy
import functools
import logging
from types import MappingProxyType
from typing import Any, Self, Unpack

from jax.sharding import PartitionSpec

from partitioning.mesh import MeshConfig
from partitioning.partitioner.base_pjit import BasePjitPartitioner
from partitioning.partitioner.chosen_rules import (
    axes_in_use,
    check_batch_rule,
    check_not_names_by_path,
    choose_rules,
    describe_layout,
    with_slices,
)
from partitioning.partitioner.initializing import check_is_state
from partitioning.partitioner.keyword_hints import explain_positions
from partitioning.partitioner.settings import (
    LayoutSetting,
    LaysOutStates,
    MeshSetting,
    default_mesh_of,
    read_mesh,
    read_parts,
)
from partitioning.partitioner.t5x_settings import (
    T5xSettings,
    check_settings,
    decide_shape,
    of_mesh,
    settings_of,
)
from partitioning.plan import (
    Audit,
    Finding,
    Plan,
    RuleSet,
    build_plan,
    impose_plan,
    lint,
    with_proposal,
)
from partitioning.plan.layouts import RuleLayout, WordLayout
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    as_tuple,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)
from partitioning.state import KnownBoxes, get_logical_axes, says_itself, with_boxes
from partitioning.tracebacks import hide_own_frames

_LOGGER = logging.getLogger(__name__)


class PjitPartitioner(BasePjitPartitioner):
    """Lays out states and batches over a mesh, and partitions functions, on `jax.jit`.

    Usage:
      partitioner = PjitPartitioner({'data': -1, 'model': 2}, rules)
      state, step, data_spec = partitioner.setup(init, train_step, key)
      for batch in batches:
        state, metrics = step(state, partitioner.to_global(batch))

    Args:
      mesh: a jax Mesh or AbstractMesh, a MeshConfig, the sizes of its axes, of which one may be -1,
        or a described machine, 'v5p:4x4x4' or a Topology, with all devices on the axis 'data'.
      layout: logical axis rules, by default `standard_logical_axis_rules`; 'fsdp', which shards
        every array over all devices, or 'data_parallel'; (regular expression on paths,
        PartitionSpec) pairs; a Plan; or a ShardingPlan. Only rules need a `mesh`.
      **t5x: T5X's arguments; see `T5xSettings`. T5X's other methods are in `NamesOfOthers`.

    Attributes:
      mesh, logical_axis_rules: the jax Mesh, and the rules under which functions are traced.
      data_partition_spec, padded_data_partition_spec: the spec of the rows of a batch, and the same
        for numbers of rows that its axes do not divide, which XLA pads inside a function.
    """

    @hide_own_frames
    @explain_positions("write T5X's arguments by name, such as num_partitions=2, backend='cpu'")
    def __init__(
        self,
        mesh: MeshSetting | None = None,
        layout: LayoutSetting | None = None,
        **t5x: Unpack[T5xSettings],
    ):
        check_settings(t5x, T5xSettings, type(self).__name__)
        self._layout, self._given_rules = read_parts(layout, t5x)
        if mesh is None and not decide_shape(t5x):
            mesh = default_mesh_of(self._layout)
        super().__init__(mesh, **of_mesh(t5x))

    # The rules.

    @property
    def logical_axis_rules(self) -> AxisRules:
        return self._rules_in_use

    @property
    def _logical_axis_rules(self) -> AxisRules:
        """The rules by the attribute of T5X, which its users also assign and append to.

        New rules apply to what is planned or partitioned from then on, as in T5X.
        """
        return AxisRules(self.logical_axis_rules)

    @_logical_axis_rules.setter
    def _logical_axis_rules(self, rules: LogicalAxisRules) -> None:
        if isinstance(self._layout, str):
            raise ValueError(
                f'layout={self._layout!r} already determines the rules: make a partitioner with '
                'rules for its layout'
            )
        given, chosen = self._given_rules, isinstance(rules, AxisRules)
        self._given_rules = AxisRules(rules) if chosen or given is None else given.with_rules(rules)
        self._forget(kept=('mesh', '_local_chunker'))

    @functools.cached_property
    def _rules_in_use(self) -> AxisRules:
        rules = choose_rules(self._given_rules, self._layout, self.mesh)
        slices, source = self._slice_axis, self._mesh_source
        if slices is None or self._has_default_rules or not isinstance(source, MeshConfig):
            return rules
        return with_slices(rules, slices)

    @property
    def _has_default_rules(self) -> bool:
        return self._given_rules is None or self._given_rules.are_defaults

    def with_rules(self, logical_axis_rules: LogicalAxisRules) -> Self:
        """The same partitioner with other rules; AxisRules also replace policies and names."""
        check_not_names_by_path(AxisRules(logical_axis_rules), self.mesh)  # built once, for both
        other = copy.copy(self)
        other._logical_axis_rules = logical_axis_rules
        return other

    def with_mesh(self, mesh: MeshSetting) -> Self:
        """The same partitioner on another mesh. It knows the states that this one has planned."""
        other = copy.copy(self)
        other._mesh_source = read_mesh(mesh, {})
        other._t5x_settings = settings_of(other._mesh_source)
        other._forget()
        return other

    @functools.cached_property
    def _rule_set(self) -> RuleSet:
        """The rules for parameters and optimizer, with their policies."""
        check_not_names_by_path(self.logical_axis_rules, self.mesh)
        layout: WordLayout | RuleLayout | None = None
        if isinstance(self._layout, str):
            # Arrays are replicated over slices: they are gathered in every layer, and the data
            # centre network between slices is too slow for that. Only gradients cross it.
            axes = [a for a, n in self.mesh.shape.items() if n > 1 and a != self._slice_axis]
            layout = WordLayout(self._layout, tuple(axes))
        elif isinstance(self._layout, RuleLayout):
            layout = self._layout
        return RuleSet(
            rules=AxisRules(self.logical_axis_rules),
            layout=layout,
            are_defaults=self._has_default_rules,
        )

    @property
    def _gradient_rules(self) -> AxisRules | None:
        return AxisRules(self.logical_axis_rules).optimizer

    @functools.cached_property
    def _data_axis(self) -> MeshAxes:
        if self._has_default_rules:
            self._check_default_rules()
        check_batch_rule(self.logical_axis_rules, self.mesh, self._layout)
        batch = logical_to_mesh_axes(
            ['batch'], self.logical_axis_rules, mesh=self.mesh, on_unmatched='replicate'
        )
        axes = batch[0] if batch else None
        if (slices := self._slice_axis) is not None and slices not in as_tuple(axes):
            _LOGGER.warning(
                "'batch' is sharded over %s, so each of the %d parts of %r computes the same rows",
                axes,
                self.mesh.shape[slices],
                slices,
            )
        return axes

    @functools.cached_property
    def _checked_data_spec(self) -> PartitionSpec:
        rules = self.logical_axis_rules
        check_batch_rule(rules, self.mesh, self._layout, must_shard=True)
        return self.data_partition_spec

    def _check_default_rules(self) -> None:
        """Rules that the user did not choose must not leave a mesh axis unused."""
        if self._layout is None:
            standard_logical_axis_rules(mesh_axes=axes_in_use(self.mesh))

    def _description(self) -> list[tuple[str, str]]:
        built = self._mesh_without_building() is not None
        rules = self.logical_axis_rules if built else self._given_rules
        chosen = built or not self._has_default_rules
        return [*super()._description(), *describe_layout(rules, self._layout, chosen=chosen)]

    # Plans and states.

    # A class attribute, because subclasses need not call __init__. It is replaced and not changed,
    # so that a copy by with_rules does not see the names of states that it has not planned.
    _boxed_states: KnownBoxes = MappingProxyType({})

    def _with_names(self, train_state: Any) -> Any:
        """The state with the linen boxes that it had when this partitioner last saw it."""
        if says_itself(train_state):
            return train_state
        named, self._boxed_states = with_boxes(train_state, self._boxed_states)
        return named

    def _plan_state(self, train_state: Any) -> Plan:
        layout = self._layout
        if isinstance(layout, LaysOutStates):
            layout = layout.plan_state(train_state, self.mesh, self.logical_axis_rules)
        if isinstance(layout, Plan):
            return impose_plan(layout, train_state, self.mesh)
        named, rules = self._with_names(train_state), self._rule_set
        try:
            if self._has_default_rules:
                self._check_default_rules()
        except ValueError as error:
            raise with_proposal(error, named, rules, self.mesh) from None
        said, cls = None, type(self)
        if self._layout is None and cls.get_logical_axes is not PjitPartitioner.get_logical_axes:
            said = self._said_axes(train_state)
        try:
            return build_plan(named, rules, self.mesh, said=said)
        except ValueError as error:
            axes = [axis for _, given in self.logical_axis_rules for axis in as_tuple(given)]
            if self._layout is not None or {*axes} <= {*self.mesh.shape}:
                raise
            raise with_proposal(error, named, rules, self.mesh) from None

    def _said_axes(self, train_state: Any) -> Any:
        """The logical axes from a subclass that overrides `get_logical_axes`, as in T5X."""
        return self.get_logical_axes(train_state)

    def get_logical_axes(self, train_state: Any) -> Any:
        check_is_state(train_state, 'get_logical_axes', 'plan(init, key).logical_axes')
        if self._layout is not None:
            return self._plan_state(train_state).logical_axes
        return get_logical_axes(self._with_names(train_state), self.logical_axis_rules.names)

    @hide_own_frames
    def audit(self, train_state: Any, named: Any = None, *, budget: float | None = None) -> Audit:
        """What each device holds of a state, and why; above `budget` bytes, raises ValueError.

        `named` is the state with its names, if they are lost and unknown here.
        """
        if isinstance(train_state, Plan):
            raise ValueError('audit takes a state, not a Plan: write plan.audit()')
        check_is_state(train_state, 'audit', 'plan(init, key).audit()')
        plan = self._plan_state(train_state if named is None else named)
        return plan.audit(train_state, budget=budget)

    def lint(self, train_state: Any = None) -> tuple[Finding, ...]:
        """Everything wrong or suspicious in the rules, for the mesh and, if given, for a state."""
        # If a plan lays out the state, the rules do not.
        ignored = train_state is None or isinstance(self._layout, Plan | LaysOutStates)
        if train_state is not None:
            check_is_state(train_state, 'lint', 'lint(partitioner.eval_shape(init, key))')
        state = None if ignored else self._with_names(train_state)
        found = lint(self._rule_set, self.mesh, state)
        if not self._has_default_rules:
            return found
        try:
            self._check_default_rules()
        except ValueError as error:
            return Finding('error', 'rules', 'the default rules', str(error)), *found
        return found
