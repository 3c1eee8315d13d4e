"""The shardings in the text of a program that XLA has not partitioned yet.

Shardy and new versions of XLA write axes, and older ones tiles of devices:

    #sdy.sharding<@mesh, [{}, {"data", "model"}]>
    {mesh['data'=4,'model'=2], [{}, {'data','model'}]}
    {devices=[1,8]<=[8]}
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import PartitionSpec

from meshwright.program.collectives import Groups, MeshAxes
from meshwright.program.hlo_text import ArrayType, numbers_in
from partitioning.rules import from_tuple, spec_str

_SHARDY = re.compile(r'<(?:@[^,<>]*|mesh<.*?>), \[(.*?)\](?:, \w+=\{[^}]*\})*>')
_MESH = re.compile(r'\{mesh\[[^\]]*\](?:, device_ids=\([^{]*\))?, \[(.*?)\](?:, \w+=\{[^}]*\})*\}')
_AXIS = re.compile(r"""\\?["']([^"'\\]*)\\?["'](?::\((\d+)\)(\d+))?""")
_TILES = re.compile(r'\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(.*?)\}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How an array is cut.

    Attributes:
      axes: the mesh axes of each dimension; empty if the mesh has no names.
      counts: the number of shards along each dimension.
    """

    axes: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]

    def __str__(self) -> str:
        if self.axes or not self.counts:
            return spec_str(PartitionSpec(*map(from_tuple, self.axes)))
        return f'{" x ".join(map(str, self.counts))} shards'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedArray:
    """An argument of a program that is not partitioned yet.

    Attributes:
      name: the name of the argument.
      array: its global type, such as 'f32[512,2048]'.
      layout: how it is cut, or None if the text does not say.
      nbytes: its global size, in bytes.
      bytes_per_device: the size of its largest shard, in bytes.
    """

    name: str
    array: str
    layout: Layout | None
    nbytes: int
    bytes_per_device: int


def describe_argument(name: str, array: ArrayType, layout: Layout | None) -> ShardedArray:
    """Describes an argument of a global type."""
    counts = layout.counts if layout else ()
    shard = [-(-n // count) for n, count in zip(array.shape, counts, strict=False)]
    shape = (*shard, *array.shape[len(shard) :])
    return ShardedArray(
        name=name,
        array=str(array),
        layout=layout,
        nbytes=array.nbytes,
        bytes_per_device=array._replace(shape=shape).nbytes,
    )


def read_layout(text: str, mesh: MeshAxes | None) -> Layout | None:
    """Returns the layout in a text with a sharding of either kind, or None if it has none."""
    if found := _SHARDY.search(text) or _MESH.search(text):
        return _of_shardy(found[1], mesh)
    if found := _TILES.search(text):
        return _of_tiles(found, mesh)
    return Layout(axes=(), counts=()) if re.search(r'\{(replicated|maximal)', text) else None


def dimensions_of(text: str) -> list[str]:
    """The texts between the braces of '{"data"}, {}'."""
    return re.findall(r'\{([^}]*)\}', text)


def axes_in(text: str) -> tuple[str, ...]:
    """The mesh axes in a text such as '"data", "model":(1)2', with parts of axes as written."""
    found = _AXIS.findall(text)
    return tuple(f'{name}:({before}){size}' if size else name for name, before, size in found)


def size_of(axes: Sequence[str], mesh: MeshAxes | None) -> int:
    """The number of devices along axes, or along parts of them; 1 for an axis without a size."""
    sizes = mesh.sizes if mesh else {}
    return math.prod(
        int(axis.rpartition(')')[2]) if ':(' in axis else sizes.get(axis, 1) for axis in axes
    )


def _of_shardy(text: str, mesh: MeshAxes | None) -> Layout:
    axes = tuple(axes_in(dimension) for dimension in dimensions_of(text))
    return Layout(axes=axes, counts=tuple(size_of(own, mesh) for own in axes))


def _of_tiles(found: re.Match[str], mesh: MeshAxes | None) -> Layout:
    """The layout of tiles; the last dimensions may be replicated or manual ones."""
    shape, rest = numbers_in(found[1]), found[5]
    kinds = re.search(r'last_tile_dims=\{([^}]*)', rest)
    extra = kinds[1].count(',') + 1 if kinds else int('last_tile_dim_replicate' in rest)
    counts = shape[: len(shape) - extra]
    if found[4]:
        devices = np.array(numbers_in(found[4]))
    else:
        sizes = numbers_in(found[2])
        order = numbers_in(found[3]) if found[3] else range(len(sizes))
        devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(tuple(order))
    devices = devices.reshape(shape)
    if mesh is None or devices.size != math.prod(mesh.sizes.values()):
        return Layout(axes=(), counts=counts)
    return Layout(
        axes=tuple(mesh.within(_along(devices, i)) for i in range(len(counts))), counts=counts
    )


def _along(devices: np.ndarray, dimension: int) -> Groups:
    """The groups of devices that differ in one dimension of the tiles."""
    rows = np.moveaxis(devices, dimension, -1).reshape(-1, devices.shape[dimension])
    return tuple(tuple(int(n) for n in row) for row in rows)
