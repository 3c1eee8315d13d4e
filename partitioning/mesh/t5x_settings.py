"""Converts T5X's settings of a mesh to axes, and checks that they do not contradict each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from partitioning.hardware import HardwareMesh
from partitioning.mesh.validation import as_tuple_of, check_count, check_names
from partitioning.rules import is_count

MESH_AXES = ('data', 'model')
MULTISLICE_MESH_AXES = ('replica', 'data', 'model')


def t5x_axes(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
    mesh_axis_names: Sequence[str] | None,
) -> dict[str, Any]:
    """Converts T5X's settings to the arguments of MeshConfig.

    Raises:
      ValueError: if no setting or several decide the model axis, or if the names do not fit them.
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
    _check_one_decides({k: v for k, v in choices.items() if v is not None}, dcn_mesh_shape)
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        if mesh_axis_names is None:
            if not len(ici_mesh_shape) == len(dcn_mesh_shape) == len(MULTISLICE_MESH_AXES):
                raise ValueError(
                    f'ici_mesh_shape {tuple(ici_mesh_shape)} and dcn_mesh_shape '
                    f'{tuple(dcn_mesh_shape)} need one size for each of {MULTISLICE_MESH_AXES}, or '
                    'mesh_axis_names with other names'
                )
            mesh_axis_names = MULTISLICE_MESH_AXES
        arguments = hybrid_axes(ici_mesh_shape, dcn_mesh_shape, mesh_axis_names)
        return {**arguments, 'slice_axis': 'replica' if 'replica' in mesh_axis_names else None}
    tile = model_parallel_submesh
    size = num_partitions if tile is None else math.prod(tile)
    given = MESH_AXES if mesh_axis_names is None else mesh_axis_names
    names = as_tuple_of(given, 'mesh_axis_names')
    if len(names) not in (2, 3):
        raise ValueError(
            f'mesh_axis_names {names} has {len(names)} names; with num_partitions or '
            'model_parallel_submesh, a mesh has 2 axes, or 3 with one for the slices. For other '
            "axes use mesh=MeshConfig(axes={'data': -1, ...}), or ici_mesh_shape and "
            'dcn_mesh_shape'
        )
    slice_axis = 'replica' if mesh_axis_names is None else names[0] if len(names) == 3 else None
    return {
        'axes': tuple(zip(names, (1, -1, size)[-len(names) :], strict=True)),
        'slice_axis': slice_axis,
        'order': 't5x',
        'model_parallel_submesh': tile,
        '_setting_names': ('num_partitions', 'dcn'),
    }


def hybrid_axes(
    ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], axis_names: Sequence[str]
) -> dict[str, Any]:
    """Returns the arguments of MeshConfig for the two shapes of a mesh, one entry per name."""
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


def check_submesh(tile: HardwareMesh) -> HardwareMesh:
    """Returns the tile of a TPU torus as a tuple; raises ValueError if it is not one."""
    if not isinstance(tile, Sequence) or len(tile) != 4 or not all(map(is_count, tile)):
        raise ValueError(
            'model_parallel_submesh must be a 4-tuple (x, y, z, cores) of integers >= 1, not '
            f'{tile!r}'
        )
    x, y, z, cores = tile
    return x, y, z, cores


def _check_one_decides(given: dict[str, Any], dcn_mesh_shape: Sequence[int] | None) -> None:
    """Checks that exactly one of the settings that are not None decides the model axis."""
    if not given:
        raise ValueError(
            'At least one of num_partitions, model_parallel_submesh, ici_mesh_shape (with '
            'dcn_mesh_shape) or mesh must be set'
        )
    if 'model_parallel_submesh' in given:
        check_submesh(given['model_parallel_submesh'])
    if 'num_partitions' in given:
        check_count(given['num_partitions'], 'num_partitions')
    if 'ici_mesh_shape' in given:
        ici = as_tuple_of(given['ici_mesh_shape'], 'ici_mesh_shape')
        model = (*ici[-1:], *as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')[-1:])
        if all(map(is_count, model)) and math.prod(model) == given.get('num_partitions'):
            # T5X requires num_partitions in addition to the shapes, so accept it if it agrees.
            return
    if len(given) > 1:
        settings = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise ValueError(f'{settings} each decide the model axis: keep one of them')
