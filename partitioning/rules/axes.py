"""Mesh axes: how they are written, how large they are, and how a message names them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from jax.sharding import AbstractMesh, Mesh

# The mesh axes of one dimension: one name, several in order, or None for a replicated dimension.
MeshAxes = str | tuple[str, ...] | None
MeshLike = Mesh | AbstractMesh | Mapping[str, int]


def as_tuple(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes of one dimension as a tuple, which is empty for None."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def from_tuple(axes: Sequence[str]) -> MeshAxes:
    """The mesh axes of one dimension as a PartitionSpec writes them; the inverse of `as_tuple`."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def sharding_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec, empty for None and for UNCONSTRAINED."""
    return as_tuple(entry) if isinstance(entry, str | tuple) else ()


def axis_sizes(mesh: MeshLike) -> Mapping[str, int]:
    """The size of each axis of a mesh, in the order of the mesh.

    Raises:
      ValueError: if `mesh` is neither a mesh nor a mapping of axis names to sizes.
    """
    if not isinstance(mesh, Mesh | AbstractMesh | Mapping):
        raise ValueError(
            f"mesh={mesh!r} must be a mesh or the size of each axis, such as {{'data': 4}}"
        )
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def num_shards(axes: str | Sequence[str] | None, mesh: MeshLike) -> int:
    """The number of shards of a dimension over these mesh axes: the product of their sizes."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[axis] for axis in as_tuple(axes))


def describe_axes(mesh: MeshLike) -> str:
    """The axes of a mesh as a message shows them: `data 4 x model 2`."""
    return ' x '.join(f'{name} {size}' for name, size in axis_sizes(mesh).items())


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, ` Did you mean 'x'?`, or '' if no known name is close."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f' Did you mean {found[0]!r}?' if found else ''


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer >= 1, of Python or numpy."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1  # type: ignore[operator]
