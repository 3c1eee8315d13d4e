"""In how many rounds the devices along a mesh axis exchange what they sum."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware import has_coords, places_of, slice_bounds

# The sizes of the rounds along an axis, whose product is the size of the axis.
Rounds = tuple[int, ...]

_of_program: contextvars.ContextVar[Mapping[str, Rounds] | None] = contextvars.ContextVar(
    'rounds of the axes', default=None
)


@contextlib.contextmanager
def in_rounds(rounds: Mapping[str, Rounds]) -> Iterator[None]:
    """Sums that are traced in this context take these rounds, and one along all other axes."""
    token = _of_program.set(rounds)
    try:
        yield
    finally:
        _of_program.reset(token)


def rounds_along(axis: str) -> Rounds | None:
    """Returns the rounds along an axis of the mesh that is traced for, or None for a single one."""
    return (_of_program.get() or {}).get(axis)


@functools.lru_cache(maxsize=32)
def find_rounds(mesh: Mesh | AbstractMesh) -> Mapping[str, Rounds]:
    """Returns the axes of a mesh along which sums need several rounds, with their sizes.

    libtpu 0.0.52 compiles a reduce-scatter over all chips of a slice as an all-reduce, which moves
    twice the bytes. (It does not for 2 x 4 chips, and not for 4.) Two reduce-scatters, over all
    dimensions of the slice but one and then over the last, stay what they are. Together they move
    the bytes of a single one.

    Args:
      mesh: the mesh. An AbstractMesh has no devices, so it needs no rounds.
    """
    if isinstance(mesh, AbstractMesh) or not has_coords(mesh.devices.flat[0]):
        return {}
    found = {}
    for number, axis in enumerate(mesh.axis_names):
        devices = np.moveaxis(mesh.devices, number, 0).reshape(mesh.shape[axis], -1)[:, 0]
        places, bounds = places_of(list(devices)), slice_bounds(devices[0])
        cores = int(places[:, -1].max()) + 1
        if bounds is None or len(devices) != math.prod(bounds) * cores:
            continue
        if len(devices) <= 4 or bounds == (2, 4, 1):
            continue
        last = _straight(places)
        if last < len(devices) and len(devices) % last == 0:
            found[axis] = len(devices) // last, last
    return found


def _straight(places: np.ndarray) -> int:
    """Returns how many of the first devices of an axis lie on one line of the torus."""
    moves = np.diff(places, axis=0)
    turns = np.flatnonzero((moves != moves[0]).any(axis=1))
    return int(turns[0]) + 1 if len(turns) else len(places)
