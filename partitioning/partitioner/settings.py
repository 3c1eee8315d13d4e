"""The mesh and the layout of a partitioner: what each may be, and the rules that follow."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, get_args, runtime_checkable

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from partitioning.hardware import Topology
from partitioning.mesh import MeshConfig
from partitioning.partitioner.t5x_settings import given_for_mesh
from partitioning.plan import Plan, batch_axes
from partitioning.plan.layouts import (
    LayoutWord,
    PartitionRules,
    RuleLayout,
    check_partition_rules,
)
from partitioning.rules import (
    USUAL_BATCH_AXES,
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    MeshLike,
    as_tuple,
    axis_sizes,
    describe_axes,
    from_tuple,
    nearest,
)
from partitioning.rules.checks import axis_problems

# What a mesh is made from, and what can describe that.
AnyMesh = Mesh | AbstractMesh | MeshConfig
MeshSetting = AnyMesh | Mapping[str, int] | Topology | str | int


@runtime_checkable
class LaysOutStates(Protocol):
    """A layout that is made for each state, such as `compat.pytorch.ShardingPlan`."""

    def plan_state(self, state: Any, mesh: Any, rules: AxisRules, /) -> Plan:
        """The plan of the parameters of a state; names in it are resolved by the rules."""


@runtime_checkable
class StandsForLayout(Protocol):
    """A value that stands for another layout, such as the result of `suggest_rules`."""

    def as_layout(self) -> LayoutSetting:
        """The other layout."""


# A layout that does not consist of logical axis rules.
OtherLayout = LayoutWord | RuleLayout | Plan | LaysOutStates
LayoutSetting = LogicalAxisRules | PartitionRules | OtherLayout | StandsForLayout

_LOGGER = logging.getLogger(__name__)
_WORDS = get_args(LayoutWord)
# The names that models give the batch. A layout word shards these logical axes of activations.
_BATCH_NAMES = ('batch', 'activation_batch')


def read_mesh(mesh: MeshSetting | None, t5x_settings: Mapping[str, Any]) -> AnyMesh:
    """The mesh or its description, from the arguments of a partitioner.

    Raises:
      ValueError: if no setting decides the mesh, or if two settings contradict each other.
    """
    given = given_for_mesh(t5x_settings)
    if isinstance(mesh, int) and not isinstance(mesh, bool):  # T5X's first argument
        if 'num_partitions' in given:
            raise ValueError(
                f'{mesh} and num_partitions={given["num_partitions"]} are given: keep one'
            )
        mesh, given = None, {'num_partitions': mesh, **given}
    if mesh is None:
        if given.keys() == {'num_partitions'}:
            return _mesh_of_partitions(**given)
        return MeshConfig.from_t5x(**given)
    if isinstance(mesh, Mapping) and given.keys() <= {'backend'}:
        return MeshConfig(axes=mesh, **given)
    if given:
        names = ', '.join(given)
        raise ValueError(f'mesh= already determines {names}; remove {names}, or mesh=')
    if isinstance(mesh, Mesh | AbstractMesh | MeshConfig):
        return mesh
    if isinstance(mesh, Topology):
        return MeshConfig(axes=_USUAL_AXES, slice_axis='replica', devices=mesh.devices)
    if isinstance(mesh, str) and mesh not in _WORDS and '=' not in mesh:
        return MeshConfig(axes=_USUAL_AXES, slice_axis='replica', topology=mesh)
    if is_layout(mesh):
        raise ValueError(f'{_short(mesh)} is a layout, not a mesh: write layout={_short(mesh)}')
    raise ValueError(
        f'mesh={_short(mesh)} must be a jax Mesh or AbstractMesh, axis sizes such as '
        "{'data': -1, 'model': 2}, a MeshConfig, or a machine such as 'v5p:4x4x4'"
    )


_USUAL_AXES = {'data': -1, 'model': 1}
_mesh_of_partitions = functools.lru_cache(maxsize=64, typed=True)(MeshConfig.from_t5x)


def default_mesh_of(layout: OtherLayout | None) -> MeshSetting | None:
    """The mesh of a layout if none is given: that of a plan, or else all devices on 'data'."""
    if isinstance(layout, Plan):
        mesh = layout.mesh
        return mesh if isinstance(mesh, Mesh | AbstractMesh) else dict(axis_sizes(mesh))
    return None if layout is None else 1


def is_layout(x: Any) -> bool:
    """Whether a value can be the argument `layout`; it need not be valid."""
    if isinstance(x, Plan | RuleLayout | AxisRules | LaysOutStates | StandsForLayout):
        return True
    if isinstance(x, str):
        return x in _WORDS
    pairs = isinstance(x, list | tuple) and all(isinstance(r, list | tuple) for r in x)
    return bool(x) and pairs and all(len(r) == 2 and isinstance(r[0], str) for r in x)


def read_layout(
    layout: Any, rules: LogicalAxisRules | None
) -> tuple[OtherLayout | None, AxisRules | None]:
    """The layout of states if it is not by rules, and the rules, from a partitioner's arguments.

    Args:
      layout: the argument `layout`.
      rules: T5X's `logical_axis_rules`.

    Raises:
      ValueError: if one is malformed, or if they contradict each other.
    """
    given = None if rules is None else AxisRules(rules)
    if layout is None:
        return None, given
    if isinstance(layout, StandsForLayout):
        layout = layout.as_layout()
    if isinstance(layout, str):
        if layout not in _WORDS:
            instead = f'. Write Plan.load({layout!r})' if layout.endswith('.json') else ''
            raise ValueError(f'{_must_be(layout)}{instead or nearest(layout, _WORDS)}')
        _check_no_rules(f'layout={layout!r}', given)
        return cast(LayoutWord, layout), None
    if isinstance(layout, Mesh | AbstractMesh | MeshConfig | Topology):
        raise ValueError(f'layout={_short(layout)} is a mesh: write mesh=')
    if isinstance(layout, Plan | RuleLayout | LaysOutStates):
        _check_only_activations(layout, given)
        return layout, given
    if not isinstance(layout, Iterable) or isinstance(layout, Mapping | set | frozenset):
        raise ValueError(_must_be(layout))
    pairs = layout if isinstance(layout, AxisRules) else tuple(layout)
    rules_of_specs = (rule[1:] for rule in pairs if isinstance(rule, tuple | list))
    if any(isinstance(x, PartitionSpec) for values in rules_of_specs for x in values):
        _check_only_activations(made := by_partition_rules(pairs), given)
        return made, given
    _check_not_paths(pairs)
    _check_no_rules('layout=', given)
    return None, AxisRules(pairs)


def by_partition_rules(rules: PartitionRules, policies: AxisRules | None = None) -> RuleLayout:
    """The layout of partition rules, with the policies of other rules."""
    policies = AxisRules(()) if policies is None else policies
    return RuleLayout(check_partition_rules(rules), policies)


def _check_not_paths(rules: Sequence[Any]) -> None:
    """Raises ValueError if rules without a PartitionSpec begin with regular expressions."""
    for rule in rules:
        name = rule[0] if isinstance(rule, tuple | list) and rule else None
        if isinstance(name, str) and re.search(r'[*|$^(\\[]', name):
            raise ValueError(
                f'layout has the rule {rule!r}, but {name!r} is not a logical axis. For names by '
                'path write AxisRules(names=[...]); for mesh axes by path write '
                f'({name!r}, PartitionSpec(...))'
            )


def _check_no_rules(by: str, rules: AxisRules | None) -> None:
    if rules is not None:
        raise ValueError(
            f'{by} already determines what logical_axis_rules would: remove logical_axis_rules '
            'or layout'
        )


def _check_only_activations(layout: Any, rules: AxisRules | None) -> None:
    """Rules next to a layout of the whole state have no names and nothing for the optimizer."""
    for name in ('names', 'optimizer'):
        given = getattr(rules, name, None)
        if given is not None and (given or name == 'optimizer'):
            raise ValueError(
                f'layout={_short(layout)} already determines what {name}= of logical_axis_rules '
                f'would: remove {name} or layout'
            )


def _must_be(layout: Any) -> str:
    return (
        f"layout={_short(layout)} must be 'fsdp', 'data_parallel', logical axis rules such as "
        "[('embed', 'data'), ...], partition rules such as [('.*/kernel', PartitionSpec('data')), "
        '...], or a Plan'
    )


def _short(x: Any) -> str:
    """A value in a message, or its type if its repr is long."""
    shown = repr(x)
    return shown if len(shown) <= 80 and '\n' not in shown else f'<{type(x).__name__}>'


def activation_rules(layout: OtherLayout | None, mesh: MeshLike, policies: AxisRules) -> AxisRules:
    """The rules for activations if the user gives none.

    Under a word every mesh axis shards the batch, and all other dimensions are replicated, whatever
    their names. Under partition rules the batch is sharded over the mesh axes that have the usual
    names; without any of them there are no rules.
    """
    sizes = axis_sizes(mesh)
    if isinstance(layout, str):
        axes = tuple(axis for axis in sizes if sizes[axis] > 1) or tuple(sizes)[:1]
        rules: list[tuple[str, MeshAxes]] = [(name, from_tuple(axes)) for name in _BATCH_NAMES]
        return AxisRules(rules, on_unmatched='replicate')
    if layout is None:
        return policies.with_rules(())
    known = tuple(axis for axis in sizes if axis in USUAL_BATCH_AXES)
    return policies.with_rules([('batch', from_tuple(known))] if known else ())


def describe_rules(rules: Any) -> str:
    """Rules in their order: `batch -> data; mlp, heads -> model; kv -> replicated`."""
    groups = (
        f'{", ".join(name for name, _ in alike)} -> {" x ".join(as_tuple(axes)) or "replicated"}'
        for axes, alike in itertools.groupby(rules, key=lambda rule: rule[1])
    )
    return '; '.join(groups) or 'none'


def check_batch_rule(
    rules: LogicalAxisRules,
    mesh: Mesh | AbstractMesh,
    layout: OtherLayout | None,
    *,
    must_shard: bool = False,
) -> None:
    """Raises ValueError if the batch has no rule by mistake, and warns if that may be on purpose.

    Under partition rules, a rule or the name of a mesh axis must shard the batch. Other rules may
    omit 'batch', which is logged, unless the batch `must_shard`; a name similar to 'batch' is a
    mistake. A policy of rules can replicate names without a rule.
    """
    axes = batch_axes(mesh, rules)
    if layout is not None and not rules:
        axis = next(iter(axis_sizes(mesh)))
        raise ValueError(
            f'no axis of the mesh {describe_axes(mesh)} has a usual name for the batch '
            f"({', '.join(USUAL_BATCH_AXES)}): add logical_axis_rules=[('batch', {axis!r})] next "
            'to the partition rules'
        )
    names = {name for name, _ in rules}
    if 'batch' not in names and mesh.size > 1 and (hint := nearest('batch', names)):
        raise ValueError(
            f"no rule for 'batch', so each device would compute all rows.{hint} Write "
            f"{('batch', axes)!r}, or ('batch', None) to replicate it on purpose"
        )
    for rule in rules:
        wrong = [*axis_problems(as_tuple(rule[1]), mesh)] if rule[0] == 'batch' else []
        if wrong:
            raise ValueError(
                f'rule {tuple(rule)!r}: {wrong[0].message.rstrip(".")}. Write '
                f'{("batch", axes)!r} in its place, and axes of this mesh in the other rules'
            )
    if 'batch' in names or mesh.size == 1:
        return
    text = "no rule for 'batch': each device computes all of its rows"
    replicates = getattr(rules, 'on_unmatched', 'error') == 'replicate'
    if replicates or not must_shard:
        _LOGGER.warning('%s. To shard them, add %r to the rules', text, ('batch', axes))
        return
    listed = ', '.join(map(repr, [('batch', axes), *map(tuple, rules)]))
    whole = f', as in logical_axis_rules=[{listed}],' if len(rules) < 8 else ' to the rules,'
    raise ValueError(
        f"no rule for 'batch', so each of the {mesh.size} devices of {describe_axes(mesh)} would "
        f'compute all rows. Add {("batch", axes)!r}{whole} or '
        "('batch', None) to replicate it on purpose"
    )
