"""How every array of a state is laid out, in numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import AxisNames, describe_axes
from partitioning.state import path_str, unbox


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """One array of a state.

    Attributes:
      path: its place in the state, `params/decoder/embedding`.
      shape: global shape.
      dtype: its type, `float32`.
      logical_axes: the name of each dimension.
      spec: the mesh axes of each dimension.
      shard_shape: what one device holds.
      bytes_total: of the global array.
      bytes_per_device: of one device's shard.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: AxisNames
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    bytes_total: int
    bytes_per_device: int


def array_layouts(state: Any, logical_axes: Any, mesh_axes: Any, mesh: Mesh) -> list[ArrayLayout]:
    """The layout of every array of a state, in its order.

    Args:
      state: a pytree of arrays or ShapeDtypeStructs.
      logical_axes: its AxisNames, as `get_logical_axes` gives them.
      mesh_axes: its PartitionSpecs, as `get_mesh_axes` gives them.
      mesh: the mesh.
    """
    arrays = jax.tree_util.tree_leaves_with_path(unbox(state))
    names = jax.tree.leaves(logical_axes)
    specs = jax.tree.leaves(mesh_axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return [
        _layout(path_str(path), array, axes, spec, mesh)
        for (path, array), axes, spec in zip(arrays, names, specs, strict=True)
    ]


def _layout(path: str, array: Any, axes: AxisNames, spec: PartitionSpec, mesh: Mesh) -> ArrayLayout:
    shard_shape = NamedSharding(mesh, spec).shard_shape(tuple(array.shape))
    itemsize = np.dtype(array.dtype).itemsize
    return ArrayLayout(
        path=path,
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        logical_axes=axes,
        spec=spec,
        shard_shape=shard_shape,
        bytes_total=math.prod(array.shape) * itemsize,
        bytes_per_device=math.prod(shard_shape) * itemsize,
    )


def layout_table(layouts: Sequence[ArrayLayout], mesh: Mesh) -> str:
    """The layouts as plain text, one array a line, with the mesh above and the sums below."""
    head = ('array', 'shape', 'dtype', 'logical axes', 'spec', 'shard shape', 'bytes per device')
    rows = [
        (
            row.path,
            _sizes(row.shape),
            row.dtype,
            ', '.join(str(name) for name in row.logical_axes) or '-',
            spec_str(row.spec),
            _sizes(row.shard_shape),
            f'{row.bytes_per_device:,}',
        )
        for row in layouts
    ]
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        '  '.join(
            cell.rjust(w) if i == len(head) - 1 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, tuple('-' * w for w in widths), *rows]
    ]
    total, held = sum(r.bytes_total for r in layouts), sum(r.bytes_per_device for r in layouts)
    return '\n'.join(
        [
            f'mesh: {describe_axes(mesh.shape)} ({mesh.size} devices)',
            '',
            *(line.rstrip() for line in lines),
            '',
            f'{len(layouts)} arrays, {total:,} bytes; {held:,} bytes per device '
            f'({held / max(total, 1):.1%} of the whole; evenly sharded {1 / mesh.size:.1%})',
            '',
        ]
    )


def spec_str(spec: PartitionSpec) -> str:
    """A spec as code: `P(None, 'model')`."""
    return f'P({", ".join(repr(axes) for axes in spec)})'


def _sizes(shape: tuple[int, ...]) -> str:
    return ' x '.join(map(str, shape)) or 'scalar'
