"""Partitioned functions over an AbstractMesh, which can be traced and lowered but not called."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh

from partitioning.programs.partitioned import PartitionedCallable
from partitioning.rules import check_has_devices


def without_devices(partitioned: PartitionedCallable, mesh: AbstractMesh) -> PartitionedCallable:
    """A partitioned function over a mesh without devices.

    `trace` and `eval_shape` work as usual. `lower` lowers for JAX's default backend; for another
    one, write `trace(...).lower(lowering_platforms=('tpu',))`. Calls raise ValueError.
    """

    @functools.wraps(cast(Any, partitioned))
    def refuse(*args: Any, **kwargs: Any) -> Any:
        name = getattr(partitioned, '__name__', 'a partitioned function')
        check_has_devices(mesh, f'calling or compiling {name}')

    def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        traced = partitioned.trace(*args, **kwargs)
        return traced.lower(lowering_platforms=(jax.default_backend(),))

    vars(refuse).update(lower=lower, lower_and_compile=refuse)
    return cast(PartitionedCallable, refuse)
