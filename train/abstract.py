"""What a run computes with, before there is any array: shapes, types and shardings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from partitioning import BasePartitioner, unbox
from partitioning.partitioner.partitioned import CompiledPartitionedCallable
from partitioning.plan.rule_set import ResolvedState
from train.data.rows.open_task import features
from train.steps import make_eval_step


def abstract_arrays(named: Any, resolved: ResolvedState) -> Any:
    """ShapeDtypeStructs of a state, or of parameters, with the shardings they resolve to."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        unbox(named),
        resolved.shardings,
    )


def abstract_batch(row: Mapping[str, Any], batch_size: int, partitioner: BasePartitioner) -> Any:
    """ShapeDtypeStructs [batch, ...] of batches of such rows."""
    sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
    return {
        name: jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in features(dict(row)).items()
    }


def compile_eval_step(
    partitioner: BasePartitioner, model: Any, axes: Any, params: Any, batch: Any
) -> CompiledPartitionedCallable:
    """The evaluation of a batch, compiled.

    Args:
      partitioner: lays it out.
      model: the linen module.
      axes: PartitionSpecs of the parameters.
      params: the parameters, abstract.
      batch: a batch, abstract.
    """
    in_axes = (axes, partitioner.data_partition_spec)
    return partitioner.compile(
        partitioner.partition(make_eval_step(model), in_axes, None), params, batch
    )
