"""Checks the settings of partitioners, derives rules from them, and describes them as text.

`PartitionerObject` is a partitioner as a Python object: its repr, its copies and pickles, and T5X's
attributes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import textwrap
from collections.abc import Collection, Mapping
from typing import Any, Self, cast, get_args

from jax.sharding import AbstractMesh, AxisType, Mesh

from partitioning.mesh import MeshConfig, describe_devices
from partitioning.plan import Plan
from partitioning.plan.layouts import (
    LayoutWord,
    PartitionRules,
    check_partition_rules,
)
from partitioning.rules import (
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

AnyMesh = Mesh | AbstractMesh | MeshConfig


class T5xSetting:
    """A read-only attribute for a setting, with the name that T5X gives it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, partitioner: Any, owner: type | None = None) -> Any:
        if partitioner is None:
            return self
        settings = vars(partitioner).get('_t5x_settings', {})
        return vars(partitioner).get(self._name, settings.get(self._name.removeprefix('_')))

    def __set__(self, partitioner: Any, value: Any) -> None:
        if '_t5x_settings' not in vars(partitioner):  # a subclass that makes its own mesh
            vars(partitioner)[self._name] = value
            return
        raise AttributeError(
            f'{self._name}={value!r} would have no effect, because the mesh is already determined: '
            f'make another {type(partitioner).__name__}({self._name.removeprefix("_")}={value!r})'
        )


class PartitionerObject:
    """The behaviour of a partitioner as a Python object: its attributes, repr, and copies."""

    _mesh_source: AnyMesh
    _t5x_settings: dict[str, Any]
    # The names of the class's cached properties, and of the ones that were assigned: subclasses of
    # T5X's partitioners assign some.
    _cached_properties: frozenset[str] = frozenset()
    _assigned: frozenset[str] = frozenset()

    _num_partitions = T5xSetting()
    _model_parallel_submesh = T5xSetting()
    _backend = T5xSetting()
    _ici_mesh_shape = T5xSetting()
    _dcn_mesh_shape = T5xSetting()

    @property
    def mesh_source(self) -> AnyMesh:
        """What the mesh is made from: a MeshConfig, or the mesh itself.

        A MeshConfig can describe other machines, for which `mesh` would raise. If a subclass makes
        its own mesh, or a mesh was assigned, the source is that mesh.
        """
        if 'mesh' in self._assigned or self._maker_of_mesh is not None:
            return self.mesh  # type: ignore[attr-defined]
        return self._mesh_source

    @property
    def _maker_of_mesh(self) -> type | None:
        """The class that makes the mesh, or None if it is a class of this package."""
        [by, *_] = (cls for cls in type(self).__mro__ if 'mesh' in vars(cls))
        return None if by.__module__.startswith('partitioning.') else by

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._cached_properties = frozenset(
            name
            for name in dir(cls)
            if isinstance(getattr(cls, name, None), functools.cached_property)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        # A cached property stores its own value without this method.
        if name in self._cached_properties:
            object.__setattr__(self, '_assigned', self._assigned | {name})

    def _forget(self, kept: Collection[str] = ()) -> None:
        """Forgets every cached value except those in `kept`; assigned values stay."""
        for name in self._cached() - {*kept}:
            del vars(self)[name]

    def _cached(self) -> set[str]:
        return {*vars(self)} & self._cached_properties - self._assigned

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: Any) -> Self:
        return self.__copy__()  # everything that a partitioner holds is immutable

    def __getstate__(self) -> dict[str, Any]:
        computed = {*self._cached(), '_boxed_states'}  # boxes may hold a mesh
        held = {name: value for name, value in vars(self).items() if name not in computed}
        for mesh in held.values():
            if isinstance(mesh, Mesh):
                raise ValueError(
                    f'this {type(self).__name__} holds the devices of its mesh '
                    f'{describe_axes(mesh)}, which cannot be pickled: make it with '
                    f'mesh=MeshConfig(axes={dict(mesh.shape)}) in place of the Mesh'
                )
        return held

    def __repr__(self) -> str:
        rows = self._description()
        width = max(len(name) for name, _ in rows)
        indent = ' ' * (width + 4)
        lines = [type(self).__name__]
        for name, text in rows:
            first = f'  {name:<{width}}  '
            lines += textwrap.wrap(
                text,
                width=96,
                initial_indent=first,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return '\n'.join(lines)

    def _description(self) -> list[tuple[str, str]]:
        """The lines of the repr, each as a name and a text."""
        mesh = self._mesh_without_building()
        if mesh is None:
            by = self._maker_of_mesh
            made = repr(self._mesh_source) if by is None else f'made by {by.__name__}.mesh'
            return [('mesh', f'not built yet: {made}')]
        axes = ' x '.join(
            f'{name} {size}' + (f' ({kind.name})' if kind != AxisType.Auto else '')
            for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        )
        if isinstance(mesh, AbstractMesh):
            return [('mesh', f'{axes}, an AbstractMesh without devices')]
        return [('mesh', f'{axes}, {describe_devices(mesh)}')]

    def _mesh_without_building(self) -> Mesh | AbstractMesh | None:
        """The mesh if it is built, or else None: building it may take long, or fail."""
        mesh = vars(self).get('mesh', vars(self).get('_mesh_source'))
        return None if isinstance(mesh, MeshConfig) else mesh


def choose_mesh_source(mesh: AnyMesh | None, t5x_settings: dict[str, Any]) -> AnyMesh:
    """The mesh or its description, from the arguments of a partitioner."""
    if mesh is None:
        settings = {name: value for name, value in t5x_settings.items() if value is not None}
        if settings.keys() == {'num_partitions'}:
            return _mesh_of_partitions(**settings)
        return MeshConfig.from_t5x(**settings)
    if not isinstance(mesh, Mesh | AbstractMesh | MeshConfig):
        raise ValueError(
            f'mesh={mesh!r} must be a MeshConfig, a jax.sharding.Mesh or an AbstractMesh, such as '
            "MeshConfig(axes={'data': -1, 'model': 2})"
        )
    if given := [name for name, value in t5x_settings.items() if value is not None]:
        raise ValueError(f'mesh= already determines {", ".join(given)}; remove {", ".join(given)}')
    return mesh


_mesh_of_partitions = functools.lru_cache(maxsize=64, typed=True)(MeshConfig.from_t5x)


def settings_of_t5x(mesh: AnyMesh | None, given: dict[str, Any]) -> dict[str, Any]:
    """T5X's settings and their values; with `mesh=`, `num_partitions` is the size of 'model'."""
    if mesh is None:
        return given
    if not isinstance(mesh, MeshConfig):
        return {'num_partitions': axis_sizes(mesh).get('model', 1)}
    sizes = [dict(axes or ()).get('model', 1) for axes in (mesh.axes, mesh.dcn)]
    tile = mesh.model_parallel_submesh
    return {
        'num_partitions': None if tile or -1 in sizes else sizes[0] * sizes[1],
        'model_parallel_submesh': tile,
        'backend': mesh.backend,
    }


def describe_rules(rules: Any) -> str:
    """Rules in their order: `batch -> data; mlp, heads -> model; kv -> replicated`."""
    groups = (
        f'{", ".join(name for name, _ in alike)} -> {" x ".join(as_tuple(axes)) or "replicated"}'
        for axes, alike in itertools.groupby(rules, key=lambda rule: rule[1])
    )
    return '; '.join(groups) or 'none'


_LOGGER = logging.getLogger(__name__)
LayoutSetting = LayoutWord | PartitionRules

_WORDS = get_args(LayoutWord)
# The names that models give the batch. A layout word shards these logical axes of activations.
_BATCH_NAMES = ('batch', 'activation_batch')
# The mesh axes that shard the batch if no rule does. EasyLM, FJFormer and Levanter use them.
_DATA_AXES = ('replica', 'data', 'fsdp', 'dp', 'batch', 'expert')


def check_layout(
    layout: Any, settings: Mapping[str, Any], with_words: Mapping[str, Any]
) -> LayoutSetting | None:
    """Checks the setting `layout`; partition rules are returned as (regular expression, mesh axes).

    Any layout replaces the settings of the partitioner in `settings`, and a word replaces
    `with_words` too.

    Raises:
      ValueError: if the layout is malformed, or if a setting that it replaces is given.
    """
    if layout is None:
        return None
    if isinstance(layout, str):
        if layout not in _WORDS:
            raise ValueError(
                f"layout={layout!r} must be 'fsdp', 'data_parallel' or partition rules such as "
                f"[('.*/kernel', PartitionSpec('data')), ...].{nearest(layout, _WORDS)}"
            )
        settings = {**settings, **with_words}
        checked, shown = cast(LayoutSetting, layout), f'layout={layout!r}'
    else:
        checked, shown = check_partition_rules(layout), 'layout='
    _check_absent(shown, settings, ' or layout')
    return checked


def activation_rules(layout: LayoutSetting, mesh: MeshLike, policies: AxisRules) -> AxisRules:
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
    known = tuple(axis for axis in sizes if axis in _DATA_AXES)
    return policies.with_rules([('batch', from_tuple(known))] if known else ())


def check_plan(plan: Any, settings: dict[str, Any]) -> None:
    """Raises ValueError if `plan` is not a Plan, or if settings that it replaces are given too."""
    if plan is None:
        return
    if not isinstance(plan, Plan):
        raise ValueError(
            f'plan= takes a Plan, not a {type(plan).__name__}: pass Plan.load(path) or the '
            'result of resolve'
        )
    _check_absent('plan=', settings)


def _check_absent(by: str, settings: Mapping[str, Any], instead: str = '') -> None:
    """Raises ValueError if a setting is given that `by` already determines."""
    if given := ', '.join(name for name, value in settings.items() if value):
        raise ValueError(f'{by} already determines what {given} would: remove {given}{instead}')


def check_batch_rule(
    rules: LogicalAxisRules, mesh: Mesh | AbstractMesh, layout: LayoutSetting | None
) -> None:
    """Raises ValueError if the batch has no rule by mistake, and warns if that may be on purpose.

    Under partition rules, a rule or the name of a mesh axis must shard the batch. Other rules may
    omit 'batch' on purpose, which is logged, but a name similar to 'batch' is a mistake.
    """
    if layout is not None and not rules:
        axis = next(iter(axis_sizes(mesh)))
        raise ValueError(
            f'no axis of the mesh {describe_axes(mesh)} has a usual name for the batch '
            f"({', '.join(_DATA_AXES)}): add logical_axis_rules=[('batch', {axis!r})] next to the "
            'partition rules'
        )
    names = {name for name, _ in rules}
    if 'batch' in names or mesh.size == 1:
        return
    if hint := nearest('batch', names):
        raise ValueError(
            f"no rule for 'batch', so each device would compute all rows.{hint} Write "
            "('batch', 'data'), or ('batch', None) to replicate it on purpose"
        )
    _LOGGER.warning("no rule for 'batch': each device computes all of its rows")
