"""Shapes, dtypes and shardings of batches, and the steps compiled for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from partitioning import BasePartitioner
from partitioning.programs.partitioned import CompiledPartitionedCallable
from train.data.rows.open_task import features
from train.steps import make_eval_step


def abstract_batch(row: Mapping[str, Any], batch_size: int, partitioner: BasePartitioner) -> Any:
    """Returns the ShapeDtypeStructs of a batch of such rows, each [batch, ...]."""
    sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
    return {
        name: jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in features(dict(row)).items()
    }


def compile_eval_step(
    partitioner: BasePartitioner, model: Any, specs: Any, params: Any, batch: Any
) -> CompiledPartitionedCallable:
    """Compiles the eval step.

    Args:
      partitioner: lays out the step over the mesh.
      model: the linen module.
      specs: the PartitionSpecs of the parameters.
      params: the ShapeDtypeStructs of the parameters.
      batch: the ShapeDtypeStructs of a batch.

    Returns:
      The compiled function (params, batch) -> sums over the targets, as in `make_eval_step`.
    """
    in_axes = (specs, partitioner.data_partition_spec)
    return partitioner.compile(
        partitioner.partition(make_eval_step(model), in_axes, None), params, batch
    )
