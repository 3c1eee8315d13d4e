"""Partitions the train step of a program of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from partitioning import PjitPartitioner, TrainState
from partitioning.mesh import MeshConfig

# (state, batch) -> (state, loss)
Step = Callable[[TrainState, Any], tuple[TrainState, Any]]


def build_step(
    mesh: Mapping[str, int],
    rules: Sequence[Any],
    init: Callable[[jax.Array], TrainState],
    step: Step,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[PjitPartitioner, Any, tuple[Any, Any]]:
    """Returns the partitioner, the partitioned step, and its arguments."""
    partitioner = PjitPartitioner(mesh=MeshConfig(axes=mesh), logical_axis_rules=rules)
    plan = partitioner.plan(init, jax.random.key(0))
    spec = partitioner.data_partition_spec
    partitioned = partitioner.partition(
        step, (plan.specs, spec), (plan.specs, None), donate_argnums=0
    )
    return partitioner, partitioned, (plan.abstract_state, batch)
