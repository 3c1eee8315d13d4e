"""T5X's arguments of partitioners, which every partitioner takes by keyword.

They are declared here once. A mesh and a layout say all of it in two arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from partitioning.hardware import HardwareMesh
from partitioning.mesh import MeshConfig
from partitioning.plan import Plan
from partitioning.rules import (
    LogicalAxisRules,
    MeshLike,
    OnIndivisible,
    OnUnmatched,
    PathRules,
    axis_sizes,
    nearest,
)


class MeshSettings(TypedDict, total=False):
    """T5X's arguments that decide the mesh.

    Attributes:
      num_partitions: the size of the 'model' axis. The remaining devices make the 'data' axis; on
        several TPU slices they make 'replica', over the data centre network, and 'data'.
      model_parallel_submesh: the (x, y, z, cores) tile of one model replica on a TPU torus, instead
        of `num_partitions`.
      params_on_devices: False if the caller keeps parameters in host memory and moves them with
        `move_params_to_devices`.
      backend: the backend whose devices to use instead of the default backend.
      ici_mesh_shape: (replica, data, model) sizes within a slice; needs `dcn_mesh_shape`.
      dcn_mesh_shape: (replica, data, model) sizes over slices.
    """

    num_partitions: int | None
    model_parallel_submesh: HardwareMesh | None
    params_on_devices: bool
    backend: str | None
    ici_mesh_shape: Sequence[int] | None
    dcn_mesh_shape: Sequence[int] | None


class T5xSettings(MeshSettings, total=False):
    """T5X's arguments of PjitPartitioner, and parts of a layout as arguments of their own.

    Attributes:
      logical_axis_rules: the layout, if it is rules. Next to a layout that is a plan or partition
        rules, they lay out the batch and activations.
      use_shardy_partitioner: True or None: JAX partitions every program with Shardy.
      plan: the layout, if it is a Plan.
      params_axes_names_override: `names` of the AxisRules that are the layout.
      optimizer_axis_rules: `optimizer` of these AxisRules.
      on_unmatched, on_indivisible: their policies, and the policies of partition rules.
    """

    logical_axis_rules: LogicalAxisRules | None
    use_shardy_partitioner: bool | None
    plan: Plan | None
    params_axes_names_override: PathRules
    optimizer_axis_rules: LogicalAxisRules | None
    on_unmatched: OnUnmatched | None
    on_indivisible: OnIndivisible | None


# The positions of arguments, as in jax.jit.
Positions = int | Sequence[int]

# The settings that decide the shape of a mesh; `backend` decides only its devices.
_SHAPES = ('num_partitions', 'model_parallel_submesh', 'ici_mesh_shape', 'dcn_mesh_shape')


def check_settings(given: Mapping[str, Any], known: type, owner: str) -> None:
    """Raises TypeError, with the nearest name, if there is an argument that does not exist."""
    names = known.__annotations__.keys() | MeshSettings.__annotations__.keys()
    for name in given:
        if name not in names:
            hint = nearest(name, {'mesh', 'layout', *names})
            if name in ('rules', 'specs', 'partition_rules'):
                hint = f' Write layout={name}'
            raise TypeError(f'{owner} has no argument {name!r}{"." if hint else ""}{hint}')
    if given.get('use_shardy_partitioner') not in (None, True):
        raise ValueError(
            f'use_shardy_partitioner={given["use_shardy_partitioner"]!r} has no effect, because '
            'JAX partitions every program with Shardy: remove it'
        )


def of_mesh(settings: T5xSettings) -> MeshSettings:
    """The settings that decide the mesh."""
    known = MeshSettings.__annotations__
    return cast(MeshSettings, {k: v for k, v in settings.items() if k in known})


def decide_shape(settings: Mapping[str, Any]) -> bool:
    """Whether T5X's settings decide the shape of the mesh."""
    return any(settings.get(name) is not None for name in _SHAPES)


def given_for_mesh(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `MeshConfig.from_t5x` takes, without those that are None."""
    names = (*_SHAPES, 'backend')
    return {name: settings[name] for name in names if settings.get(name) is not None}


def settings_of(source: MeshLike | MeshConfig) -> dict[str, Any]:
    """T5X's settings of a mesh that was described otherwise: its 'model' axis, and its tile."""
    if not isinstance(source, MeshConfig):
        return {'num_partitions': axis_sizes(source).get('model', 1)}
    sizes = [dict(axes or ()).get('model', 1) for axes in (source.axes, source.dcn)]
    tile = source.model_parallel_submesh
    return {
        'num_partitions': None if tile or -1 in sizes else sizes[0] * sizes[1],
        'model_parallel_submesh': tile,
        'backend': source.backend,
    }


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


class _Missing:
    """The default of an argument that has two names."""

    def __repr__(self) -> str:
        return 'not given'


MISSING: Any = _Missing()


def either_name(name: str, value: Any, t5x_name: str, t5x_value: Any) -> Any:
    """The value of an argument of `partition` that T5X calls by another name.

    Both names together are a ValueError, and neither is a TypeError.
    """
    if value is not MISSING and t5x_value is not MISSING:
        raise ValueError(
            f'{name} and {t5x_name}, which is its name in T5X, are both given: remove {t5x_name}'
        )
    if value is MISSING and t5x_value is MISSING:
        raise TypeError(f'partition needs {name}: give specs, such as plan.specs, or None')
    return t5x_value if value is MISSING else value
