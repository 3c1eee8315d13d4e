"""The two arguments of a partitioner: what its mesh and its layout may be."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, get_args, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from partitioning.hardware import Topology
from partitioning.mesh import MeshConfig
from partitioning.partitioner.t5x_settings import given_for_mesh
from partitioning.plan import Plan
from partitioning.plan.layouts import LayoutWord, PartitionRules, RuleLayout, check_partition_rules
from partitioning.rules import AxisRules, LogicalAxisRules, axis_sizes, nearest
from partitioning.values import value_str

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

_WORDS = get_args(LayoutWord)


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
        raise ValueError(
            f'{value_str(mesh)} is a layout, not a mesh: write layout={value_str(mesh)}'
        )
    devices = np.ravel(cast(Any, mesh))
    if devices.size and all(isinstance(device, jax.Device) for device in devices):
        raise ValueError(
            f'mesh= is {devices.size} devices without axes: write '
            "mesh=MeshConfig(axes={'data': -1}, devices=...)"
        )
    raise ValueError(
        f'mesh={value_str(mesh)} must be a jax Mesh or AbstractMesh, axis sizes such as '
        "{'data': -1, 'model': 2}, a MeshConfig, or a machine such as 'v5p:4x4x4'"
    )


_USUAL_AXES = {'data': -1, 'model': 1}
_mesh_of_partitions = functools.lru_cache(maxsize=64, typed=True)(MeshConfig.from_t5x)


def default_mesh_of(layout: OtherLayout | None) -> MeshSetting | None:
    """The mesh of a layout if none is given: a plan's own, or else all devices on 'data'."""
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

    Malformed arguments, and arguments that contradict each other, are a ValueError.
    """
    given = None if rules is None else AxisRules(rules)
    if layout is None:
        return None, given
    if isinstance(layout, StandsForLayout):
        layout = layout.as_layout()
    layout = os.fspath(layout) if isinstance(layout, os.PathLike) else layout
    if isinstance(layout, str):
        if layout not in _WORDS:
            instead = f'. Write Plan.load({layout!r})' if layout.endswith('.json') else ''
            hint = nearest(layout, _WORDS)
            raise ValueError(f'{_must_be(layout)}{instead or (hint and f".{hint}")}')
        _check_no_rules(f'layout={layout!r}', given)
        return cast(LayoutWord, layout), None
    if isinstance(layout, Mesh | AbstractMesh | MeshConfig | Topology):
        raise ValueError(f'layout={value_str(layout)} is a mesh: write mesh=')
    if isinstance(layout, Plan | RuleLayout | LaysOutStates):
        _check_only_activations(layout, given)
        return layout, given
    if not isinstance(layout, Iterable) or isinstance(layout, Mapping | set | frozenset):
        sizes = isinstance(layout, Mapping) and all(isinstance(n, int) for n in layout.values())
        hint = '. Axis sizes are a mesh: write mesh=' if sizes and layout else ''
        if isinstance(layout, Mapping) and not sizes:
            hint = '. Write a list of its items: list(layout.items())'
        elif isinstance(layout, types.FunctionType):
            hint = f'. Write {layout.__name__}(...), which calls the function'
        raise ValueError(f'{_must_be(layout)}{hint}')
    pairs = layout if isinstance(layout, AxisRules) else tuple(layout)
    if len(pairs) == 4 and all(isinstance(n, int) for n in pairs):  # T5X's second argument
        raise ValueError(
            f'layout={layout!r} is not a layout: write model_parallel_submesh={layout!r}'
        )
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
                f'layout={value_str(layout)} already determines what {name}= of logical_axis_rules '
                f'would: remove {name} or layout'
            )


def _must_be(layout: Any) -> str:
    return (
        f"layout={value_str(layout)} must be 'fsdp', 'data_parallel', logical axis rules such as "
        "[('embed', 'data'), ...], partition rules such as [('.*/kernel', PartitionSpec('data')), "
        '...], or a Plan'
    )


# The argument of a partitioner, and the argument of AxisRules.
_PARTS = {
    'optimizer_axis_rules': 'optimizer',
    'params_axes_names_override': 'names',
    'on_unmatched': 'on_unmatched',
    'on_indivisible': 'on_indivisible',
}


def read_parts(
    layout: Any, settings: Mapping[str, Any]
) -> tuple[OtherLayout | None, AxisRules | None]:
    """The layout of states if it is not by rules, and the rules, from all arguments.

    Malformed arguments, and arguments that contradict each other, are a ValueError.
    """
    plan = settings.get('plan')
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(
            f'plan= takes a Plan, not a {type(plan).__name__}: write Plan.load(path), or the '
            'result of partitioner.plan(...)'
        )
    if plan is not None and layout is not None:
        raise ValueError('plan= already determines what layout would: remove plan or layout')
    given = {name: settings[name] for name in _PARTS if settings.get(name) not in (None, ())}
    other, rules = read_layout(layout if plan is None else plan, settings.get('logical_axis_rules'))
    if not given:
        return other, rules
    parts = {_PARTS[name]: value for name, value in given.items()}
    if other is None:
        for name in given:
            if name != _PARTS[name] and getattr(rules, _PARTS[name], None):
                raise ValueError(
                    f'{name} and {_PARTS[name]}= of the rules are both given: remove {name}'
                )
        return None, AxisRules(rules, **parts)
    # A word leaves nothing open, and other layouts leave the policies.
    determined = [name for name in given if isinstance(other, str) or name != _PARTS[name]]
    if determined:
        by = f'layout={other!r}' if isinstance(other, str) else 'the layout'
        names = ', '.join(determined)
        raise ValueError(f'{by} already determines what {names} would: remove {names} or layout')
    if isinstance(other, RuleLayout):
        other = dataclasses.replace(other, policies=AxisRules(other.policies, **parts))
    return other, AxisRules(rules, **parts)
