"""T5X's settings of a mesh as axes: the contradictions between them, and what they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from partitioning.hardware import HardwareMesh
from partitioning.mesh.validation import as_tuple_of, check_count, check_names
from partitioning.rules import is_count

MESH_AXES = ('data', 'model')
MULTISLICE_MESH_AXES = ('replica', 'data', 'model')


def check_mesh_settings(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
) -> None:
    """Checks that exactly one of T5X's settings decides the model axis.

    Raises:
      ValueError: if no setting decides it, or several do; the message has the setting to add or to
        remove.
    """
    if (ici_mesh_shape is None) != (dcn_mesh_shape is None):
        raise ValueError(
            f'ici_mesh_shape={ici_mesh_shape} and dcn_mesh_shape={dcn_mesh_shape}: set both or '
            'neither (dcn_mesh_shape=(1, 1, 1) for one slice)'
        )
    choices = {
        'num_partitions': num_partitions,
        'model_parallel_submesh': model_parallel_submesh,
        'ici_mesh_shape': ici_mesh_shape,
    }
    given = {name: value for name, value in choices.items() if value is not None}
    if not given:
        raise ValueError(
            'At least one of num_partitions, model_parallel_submesh, ici_mesh_shape (with '
            'dcn_mesh_shape) or mesh must be set'
        )
    if model_parallel_submesh is not None:
        check_submesh(model_parallel_submesh)
    if num_partitions is not None:
        check_count(num_partitions, 'num_partitions')
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        ici = as_tuple_of(ici_mesh_shape, 'ici_mesh_shape')
        dcn = as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')
        model = (*ici[-1:], *dcn[-1:])
        if all(map(is_count, model)) and math.prod(model) == num_partitions:
            # T5X requires num_partitions in addition to the shapes, so accept it if it agrees.
            del given['num_partitions']
    if len(given) > 1:
        settings = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise ValueError(f'{settings} each decide the model axis: keep one of them')


def check_submesh(tile: HardwareMesh) -> HardwareMesh:
    """Returns the tile of a TPU torus as a tuple.

    Raises:
      ValueError: if it is not a sequence of four integers >= 1.
    """
    if not isinstance(tile, Sequence) or len(tile) != 4 or not all(map(is_count, tile)):
        raise ValueError(
            'model_parallel_submesh must be a 4-tuple (x, y, z, cores) of integers >= 1, not '
            f'{tile!r}'
        )
    x, y, z, cores = tile
    return x, y, z, cores


def t5x_axes(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
    mesh_axis_names: Sequence[str] | None,
) -> dict[str, Any]:
    """Returns the arguments of MeshConfig that T5X's settings, already checked, stand for.

    Raises:
      ValueError: if the number of names does not fit the settings.
    """
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        names = _names_of_shapes(ici_mesh_shape, dcn_mesh_shape, mesh_axis_names)
        return {
            **hybrid_axes(ici_mesh_shape, dcn_mesh_shape, names),
            'slice_axis': 'replica' if 'replica' in names else None,
        }
    size = num_partitions
    if model_parallel_submesh is not None:
        size = math.prod(model_parallel_submesh)
    names = _names_of_partitions(mesh_axis_names)
    sizes = (1, -1, size)[-len(names) :]
    slice_axis = 'replica' if mesh_axis_names is None else names[0] if len(names) == 3 else None
    return {
        'axes': tuple(zip(names, sizes, strict=True)),
        'slice_axis': slice_axis,
        'order': 't5x',
        'model_parallel_submesh': model_parallel_submesh,
        '_setting_names': ('num_partitions', 'dcn'),
    }


def hybrid_axes(
    ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], axis_names: Sequence[str]
) -> dict[str, Any]:
    """Returns the arguments of MeshConfig for the two shapes of a mesh.

    Raises:
      ValueError: if the shapes and the names differ in number.
    """
    names = check_names(axis_names, ici_mesh_shape, 'ici_mesh_shape')
    ici, dcn = tuple(ici_mesh_shape), as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')
    if len(dcn) != len(names):
        raise ValueError(
            f'ici_mesh_shape {ici} has {len(ici)} axes and dcn_mesh_shape {dcn} has {len(dcn)}: '
            f'give each of the axes {names} both sizes'
        )
    return {
        'axes': tuple(zip(names, ici, strict=True)),
        'dcn': tuple(zip(names, dcn, strict=True)),
        '_setting_names': ('ici_mesh_shape', 'dcn_mesh_shape'),
    }


def _names_of_partitions(mesh_axis_names: Sequence[str] | None) -> tuple[str, ...]:
    if mesh_axis_names is None:
        return MESH_AXES
    names = as_tuple_of(mesh_axis_names, 'mesh_axis_names')
    if len(names) not in (2, 3):
        raise ValueError(
            f'mesh_axis_names {names} has {len(names)} names; with num_partitions or '
            'model_parallel_submesh, a mesh has 2 axes, or 3 with one for the slices. For other '
            "axes use mesh=MeshConfig(axes={'data': -1, ...}), or ici_mesh_shape and "
            'dcn_mesh_shape'
        )
    return check_names(names, names, 'the mesh')


def _names_of_shapes(
    ici: Sequence[int], dcn: Sequence[int], mesh_axis_names: Sequence[str] | None
) -> tuple[str, ...]:
    if mesh_axis_names is not None:
        return check_names(mesh_axis_names, ici, 'ici_mesh_shape')
    if not len(ici) == len(dcn) == len(MULTISLICE_MESH_AXES):
        raise ValueError(
            f'ici_mesh_shape {tuple(ici)} and dcn_mesh_shape {tuple(dcn)} need one size for each '
            f'of {MULTISLICE_MESH_AXES}, or mesh_axis_names with other names'
        )
    return MULTISLICE_MESH_AXES
