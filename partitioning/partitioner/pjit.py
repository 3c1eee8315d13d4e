"""Partitioners on jax.jit: a mesh, rules, and the plans and functions that they make."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Self

import jax

from partitioning.hardware import HardwareMesh
from partitioning.mesh import MeshConfig
from partitioning.partitioner.base_pjit import BasePjitPartitioner
from partitioning.partitioner.settings import (
    AnyMesh,
    LayoutSetting,
    activation_rules,
    check_batch_rule,
    check_layout,
    check_plan,
    describe_rules,
    settings_of_t5x,
)
from partitioning.plan import (
    Audit,
    Finding,
    PartitionRules,
    Plan,
    RuleSet,
    build_plan,
    impose_plan,
    lint,
)
from partitioning.plan.layouts import Layout, RuleLayout, WordLayout
from partitioning.rules import (
    STANDARD_MESH_AXES,
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    OnIndivisible,
    OnUnmatched,
    as_tuple,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)
from partitioning.state import (
    KnownBoxes,
    PathRules,
    check_path_rules,
    get_logical_axes,
    says_itself,
    with_boxes,
)

_LOGGER = logging.getLogger(__name__)


class PjitPartitioner(BasePjitPartitioner):
    """A partitioner by logical axis rules, on `jax.jit`.

    Usage:
      partitioner = PjitPartitioner(num_partitions=2)
      plan = partitioner.plan(init, key)
      state = plan.init(key)  # created in its shards
      step = partitioner.partition(
          step,
          (plan.specs, partitioner.data_partition_spec),
          (plan.specs, None),
          donate_argnums=0)

    Args:
      num_partitions, model_parallel_submesh, params_on_devices, backend, ici_mesh_shape,
        dcn_mesh_shape, mesh: see BasePartitioner.
      logical_axis_rules: (logical axis, mesh axis or axes or None) pairs in order of priority. The
        default is `standard_logical_axis_rules` for the axes of the mesh. If the partitioner adds
        an axis for slices, a rule for 'batch' that has 'data' gets that axis too.
      optimizer_axis_rules: the rules for the optimizer's state, if they differ, as
        `fsdp_logical_axis_rules` makes them for ZeRO.
      on_unmatched: the policy for names without a rule, in both sets of rules. The default is the
        policy of the rules (`AxisRules`), or an error; see `resolve_axes`.
      on_indivisible: the policy for sizes that are not divisible, with the same default.
      params_axes_names_override: (regular expression, names) pairs that name parameters by their
        paths, such as 'decoder/mlp/kernel'; see `override_params_axes_names`.
      plan: the layout of the state, such as `Plan.load` reads it. It replaces the rules for the
        state; the rules still lay out the batch and activations.
      layout: decides the layout of the state by itself, whatever names its arrays have or lack:
        'fsdp' shards the largest dimension of every array, see `partitioning.plan.layouts`;
        'data_parallel' replicates every array; partition rules are for `from_partition_rules`.
        Under a word, all mesh axes shard the batch. `layout` alone means all devices.
      use_shardy_partitioner: True or None, by T5X's name: JAX partitions programs with Shardy.

    Raises:
      ValueError: if a setting is malformed, or if two settings contradict each other.
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
        mesh: AnyMesh | None = None,
        optimizer_axis_rules: LogicalAxisRules | None = None,
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
        params_axes_names_override: PathRules = (),
        plan: Plan | None = None,
        layout: LayoutSetting | None = None,
        use_shardy_partitioner: bool | None = None,
    ):
        if use_shardy_partitioner not in (None, True):
            raise ValueError(
                f'use_shardy_partitioner={use_shardy_partitioner!r} has no effect, because JAX '
                'partitions every program with Shardy: remove it'
            )
        shapes = (num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape, mesh)
        if layout is not None and all(setting is None for setting in shapes):
            num_partitions = 1
        super().__init__(
            num_partitions=num_partitions,
            model_parallel_submesh=model_parallel_submesh,
            params_on_devices=params_on_devices,
            backend=backend,
            ici_mesh_shape=ici_mesh_shape,
            dcn_mesh_shape=dcn_mesh_shape,
            mesh=mesh,
        )
        self._as_rules = functools.partial(
            AxisRules, on_unmatched=on_unmatched, on_indivisible=on_indivisible
        )
        policies = {'on_unmatched': on_unmatched, 'on_indivisible': on_indivisible}
        self._as_rules(())  # the mesh may decide the rules later, the policies are known now
        rules, of_optimizer = logical_axis_rules, optimizer_axis_rules
        self._given_rules = None if rules is None else self._as_rules(rules)
        self._optimizer_rules = None if of_optimizer is None else self._as_rules(of_optimizer)
        self._overrides = check_path_rules(params_axes_names_override)
        self._plan = plan
        of_state = {
            'optimizer_axis_rules': optimizer_axis_rules,
            'params_axes_names_override': params_axes_names_override,
        }
        self._layout = check_layout(
            layout,
            {'plan': plan, **of_state},
            {'logical_axis_rules': logical_axis_rules, **policies},
        )
        check_plan(plan, of_state)

    @classmethod
    def from_partition_rules(cls, rules: PartitionRules, **settings: Any) -> Self:
        """A partitioner by regular expressions on paths, as in EasyLM and FJFormer.

        Usage:
          rules = [('attn/.*/kernel', P('fsdp', 'mp')), ('embedding', P('mp', 'fsdp')), ('.*', P())]
          mesh = MeshConfig(axes={'dp': 1, 'fsdp': -1, 'mp': 2})
          partitioner = PjitPartitioner.from_partition_rules(rules, mesh=mesh)

        Args:
          rules: (regular expression, PartitionSpec) pairs. The first rule whose expression is found
            (`re.search`) in the path of a parameter, such as params/h/0/attn/kernel, decides its
            mesh axes; the optimizer's state follows. A spec may be shorter than the array. Arrays
            of one element are replicated. A tuple, a list, a string or None can replace a spec.
          **settings: the settings of the class. With `logical_axis_rules=[('batch', axes)]` the
            batch is sharded over these mesh axes, and otherwise over those with usual names, such
            as 'dp', 'fsdp' and 'data'. `on_unmatched` is the policy for arrays that no rule
            matches.

        Raises:
          ValueError: if a rule or a setting is malformed.
        """
        return cls(layout=rules, **settings)

    # The rules.

    @property
    def use_shardy_partitioner(self) -> bool:
        """Whether JAX partitions programs with Shardy, by T5X's name."""
        return bool(getattr(jax.config, 'jax_use_shardy_partitioner', True))

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
                f'layout={self._layout!r} already determines the rules: make a partitioner without '
                'layout, or with partition rules'
            )
        self._given_rules = self._as_rules(rules)
        self._forget(kept=('mesh', '_local_chunker'))

    @functools.cached_property
    def _rules_in_use(self) -> AxisRules:
        if self._given_rules is None and self._layout is not None:
            return activation_rules(self._layout, self.mesh, self._as_rules(()))
        if self._given_rules is None:
            # Use no defaults that would leave a mesh axis unused: without any rules, plan and
            # constrain raise.
            axes = self._axes_in_use
            known = set(axes) <= set(STANDARD_MESH_AXES)
            return self._as_rules(standard_logical_axis_rules(mesh_axes=axes) if known else ())
        slices = self._slice_axis
        if slices is None or not isinstance(self._mesh_source, MeshConfig):
            return self._given_rules
        # The axis over slices stands in front in rules that shard the batch over 'data'.
        rules: list[tuple[str, MeshAxes]] = []
        for name, given in self._given_rules:
            sharding = as_tuple(given)
            adds = name == 'batch' and slices not in sharding and 'data' in sharding
            rules.append((name, (slices, *sharding) if adds else given))
        return self._given_rules.with_rules(rules)

    def with_rules(self, logical_axis_rules: LogicalAxisRules) -> Self:
        """The same partitioner with other rules; its class, mesh, plan and policies stay.

        Args:
          logical_axis_rules: as for the constructor.
        """
        _ = self.mesh  # built once, for both
        other = copy.copy(self)
        other._logical_axis_rules = AxisRules(logical_axis_rules)
        return other

    def with_mesh(self, mesh: AnyMesh) -> Self:
        """The same partitioner on another mesh; its class, rules, layout and policies stay.

        It knows the names of the states that this partitioner has planned.

        Args:
          mesh: as for the constructor. An AbstractMesh is enough to plan a state.
        """
        other = copy.copy(self)
        other._mesh_source, other._t5x_settings = mesh, settings_of_t5x(mesh, {})
        other._forget()
        return other

    @functools.cached_property
    def rule_set(self) -> RuleSet:
        """The rules for parameters and optimizer, with their policies."""
        layout: Layout | None = None
        if isinstance(self._layout, str):
            # Arrays are replicated over slices: they are gathered in every layer, and the data
            # centre network between slices is too slow for that. Only gradients cross it.
            axes = [a for a, n in self.mesh.shape.items() if n > 1 and a != self._slice_axis]
            layout = WordLayout(self._layout, tuple(axes))
        elif self._layout is not None:
            layout = RuleLayout(self._layout, self._as_rules(()))  # type: ignore[arg-type]
        return RuleSet(
            rules=self.logical_axis_rules,
            optimizer_rules=self._optimizer_rules,
            overrides=self._overrides,
            layout=layout,
            are_defaults=self._given_rules is None,
        )

    @property
    def _gradient_rules(self) -> AxisRules | None:
        return self._optimizer_rules

    @property
    def _axes_in_use(self) -> list[str]:
        sizes = self.mesh.shape
        return [a for a in self.mesh.axis_names if sizes[a] > 1 or a in STANDARD_MESH_AXES]

    @functools.cached_property
    def _data_axis(self) -> MeshAxes:
        if self._given_rules is None:
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

    def _check_default_rules(self) -> None:
        """Rules that the user did not choose must not leave a mesh axis unused."""
        if self._plan is self._layout is None:
            standard_logical_axis_rules(mesh_axes=self._axes_in_use)

    def _description(self) -> list[tuple[str, str]]:
        built = self._mesh_without_building() is not None
        rules = self.logical_axis_rules if built else self._given_rules
        policies = self._as_rules(()) if rules is None else rules
        shown = 'standard_logical_axis_rules for the axes of the mesh'
        if rules is not None:
            shown = describe_rules(rules)
        elif self._layout is not None:
            shown = 'made by the layout, for activations'
        rows = [*super()._description(), ('rules', shown)]
        if self._optimizer_rules is not None:
            rows.append(('optimizer rules', describe_rules(self._optimizer_rules)))
        on_unmatched, on_indivisible = policies.on_unmatched, policies.on_indivisible
        rows.append(('policies', f'{on_unmatched=!r}, {on_indivisible=!r}'))
        if self._overrides:
            paths = (f'{path} -> {names}' for path, names in self._overrides)
            rows.append(('overrides', '; '.join(paths)))
        for name, value in (('plan', self._plan), ('layout', self._layout)):
            if value is not None:
                rows.append((name, f'{value!r} lays out the state, not the rules'))
        return rows

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

    def resolve(self, train_state: Any) -> Plan:
        if self._plan is not None:
            return impose_plan(self._plan, train_state, self.mesh)
        if self._given_rules is None:
            self._check_default_rules()
        said, cls = None, type(self)
        if self._layout is None and cls.get_logical_axes is not PjitPartitioner.get_logical_axes:
            said = self._said_axes(train_state)
        return build_plan(self._with_names(train_state), self.rule_set, self.mesh, said=said)

    def _said_axes(self, train_state: Any) -> Any:
        """The logical axes from a subclass that overrides `get_logical_axes`, as in T5X."""
        return self.get_logical_axes(train_state)

    def get_logical_axes(self, train_state: Any) -> Any:
        if self._plan is not None or self._layout is not None:
            return self.resolve(train_state).logical_axes
        return get_logical_axes(self._with_names(train_state), self.rule_set.overrides)

    def audit(self, train_state: Any, named: Any = None, *, budget: float | None = None) -> Audit:
        """What every device holds of a state, what is replicated, and why.

        Args:
          train_state: a pytree of arrays or ShapeDtypeStructs. The actual layout is read from the
            arrays; the intended layout comes from the rules.
          named: the state with its names, if `train_state` has lost them and this partitioner has
            not planned it: `partitioner.eval_shape(init, key)`.
          budget: the most bytes that one device may hold.

        Raises:
          ValueError: if a device holds more than `budget`, and as `resolve`.
        """
        return self.resolve(train_state if named is None else named).audit(
            train_state, budget=budget
        )

    def lint(self, train_state: Any = None) -> tuple[Finding, ...]:
        """Everything that is wrong or suspicious in the rules, for the mesh and a state.

        Args:
          train_state: a state as for `resolve`; by default only the rules are examined.
        """
        # A loaded plan lays out the state, not the rules.
        ignored = train_state is None or self._plan is not None
        state = None if ignored else self._with_names(train_state)
        found = lint(self.rule_set, self.mesh, state)
        if self._given_rules is not None:
            return found
        try:
            self._check_default_rules()
        except ValueError as error:
            return Finding('error', 'rules', 'the default rules', str(error)), *found
        return found
