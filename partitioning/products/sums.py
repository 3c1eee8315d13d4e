"""Sums over the shards of mesh axes, inside a `jax.shard_map`, in the rounds that machines need."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware import has_coords, places_of, slice_bounds
from partitioning.rules import LogicalAxisRules, as_tuple

# The sizes of the rounds along an axis, whose product is the size of the axis.
Rounds = tuple[int, ...]

_of_program: contextvars.ContextVar[Mapping[str, Rounds] | None] = contextvars.ContextVar(
    'rounds of the axes', default=None
)
# The rules that lay out gradients, if they differ from the rules of the weights. Under ZeRO, an
# optimizer's state is divided further than the weights are. Gradients that are scattered as the
# state is are never whole.
GRADIENT_RULES: contextvars.ContextVar[LogicalAxisRules | None] = contextvars.ContextVar(
    'rules of gradients', default=None
)


def scatter_sum(x: jax.Array, axes: str | tuple[str, ...], dimension: int) -> jax.Array:
    """Sums an array over Manual mesh axes and leaves each device one shard of the sum.

    It is `jax.lax.psum_scatter`, tiled, in the rounds that the machine needs: see `find_rounds`.
    The first dimension is the best one to scatter, because its shards are contiguous.

    Args:
      x: the addend of this device, of equal shape on all devices along the axes.
      axes: one or several Manual axes of the mesh. The shards of the result are in the order of the
        axes, the first axis slowest, as in a PartitionSpec.
      dimension: the dimension that is divided over the axes. They must divide its size.

    Returns:
      The shard of the sum that belongs to this device.
    """

    def scatter(x: jax.Array) -> jax.Array:
        for axis in as_tuple(axes):
            size = jax.lax.axis_size(axis)
            rounds = (_of_program.get() or {}).get(axis, (size,))
            order = np.arange(size).reshape(rounds)
            for number, together in enumerate(rounds if size > 1 else ()):
                groups = np.moveaxis(order, number, -1).reshape(-1, together).tolist()
                x = jax.lax.psum_scatter(
                    x,
                    axis,
                    scatter_dimension=dimension,
                    axis_index_groups=groups if together < size else None,
                    tiled=True,
                )
        return x

    return _in_dtype_of_sums(scatter, x)


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sums an array over Manual mesh axes, and every device along them has the sum."""
    return _in_dtype_of_sums(lambda x: jax.lax.psum(x, axes), x) if axes else x


def _in_dtype_of_sums(add: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Adds in the dtype of the array, and on CPUs in float32 at least.

    XLA's sums of 16 bits on CPUs are of float32, too, but next to Auto axes its compiler aborts the
    process: "Invalid binary instruction opcode copy", in jaxlib 0.10 to 0.12.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind != 'cpu' or x.dtype.itemsize > 2:
        return add(x)
    return add(x.astype(jnp.float32)).astype(x.dtype)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the Manual mesh axes along which the shards of an array can differ."""
    aval: Any = jax.typeof(x)
    manual = getattr(aval, 'manual_axis_type', None)  # jax before 0.10 has only `vma`
    return aval.vma if manual is None else manual.varying


@contextlib.contextmanager
def in_rounds(
    rounds: Mapping[str, Rounds], gradient_rules: LogicalAxisRules | None = None
) -> Iterator[None]:
    """Sums that are traced in this context take these rounds, and one along all other axes.

    Gradients are scattered by `gradient_rules`; None means the rules of the weights.
    """
    tokens = _of_program.set(rounds), GRADIENT_RULES.set(gradient_rules)
    try:
        yield
    finally:
        _of_program.reset(tokens[0])
        GRADIENT_RULES.reset(tokens[1])


@functools.lru_cache(maxsize=32)
def find_rounds(mesh: Mesh | AbstractMesh) -> Mapping[str, Rounds]:
    """Returns the axes of a mesh along which sums need several rounds, with their sizes.

    libtpu 0.0.52 compiles a reduce-scatter over all chips of a slice as an all-reduce, which moves
    twice the bytes. (It does not for 2 x 4 chips, and not for 4.) Two reduce-scatters, over all
    dimensions of the slice but one and then over the last, stay what they are. Together they move
    the bytes of a single one. An AbstractMesh has no devices, so it needs no rounds.
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
        # The number of the first devices that lie on one line of the torus.
        moves = np.diff(places, axis=0)
        turns = np.flatnonzero((moves != moves[0]).any(axis=1))
        last = int(turns[0]) + 1 if len(turns) else len(places)
        if last < len(devices) and len(devices) % last == 0:
            found[axis] = len(devices) // last, last
    return found
