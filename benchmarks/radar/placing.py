"""Abstract arrays with a layout, for the programs of this folder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


def make_mesh(*, kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh of virtual devices with these axes."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
    """An abstract array with a layout."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def place(mesh: Mesh, tree: Any, spec_of: Any) -> Any:
    """Abstract arrays with the layouts that a function of a shape chooses."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, spec_of(a.shape))
        ),
        tree,
    )


def shardings_of(tree: Any) -> Any:
    """The layouts of arrays."""
    return jax.tree.map(lambda a: a.sharding, tree)
