"""A partitioner for mixtures of experts, with an 'expert' axis, and T5X's functions for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.hardware import HardwareMesh
from partitioning.mesh import MeshConfig
from partitioning.mesh.validation import check_count
from partitioning.partitioner.pjit import PjitPartitioner
from partitioning.partitioner.settings import LayoutSetting
from partitioning.plan import Plan
from partitioning.rules import (
    AxisNames,
    LogicalAxisRules,
    standard_logical_axis_rules as rules_of_transformers,
)
from partitioning.state import key_names, says_itself, shape_of

# The factored statistics of experts in T5X's Adafactor, which T5X's states leave without names.
_FACTORED = re.compile(r'.*expert.*/kernel/v_.*')


class MoePjitPartitioner(PjitPartitioner):
    """PjitPartitioner on a ('data', 'expert', 'model') mesh, by T5X's name.

    The spec P('data') in `partition` means the batch, as in T5X: it becomes `data_partition_spec`.

    Usage:
      partitioner = MoePjitPartitioner(num_expert_partitions=8, num_partitions=2)

    Args:
      num_expert_partitions: the size of the 'expert' axis, which is taken out of the data axis. If
        the data axis is smaller, 'expert' takes all of it.
      num_partitions, model_parallel_submesh, params_on_devices, logical_axis_rules, backend: T5X's
        arguments; see `T5xSettings`.
      state_filter_fn: for states with T5X's `as_logical_axes()`, whether the statistic at a path of
        the optimizer's state, 'mlp/expert/wi/kernel/v_row', has 'expert' as its first logical axis.
        The default selects the factored statistics of T5X's Adafactor. In other states the
        statistics follow their parameters.
      layout: see PjitPartitioner. For another mesh, write
        PjitPartitioner(MeshConfig.from_t5x(..., num_expert_partitions=8)).

    Raises:
      ValueError: if the sizes of the two axes do not divide each other, and as PjitPartitioner.
    """

    def __init__(
        self,
        num_expert_partitions: int,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        logical_axis_rules: LogicalAxisRules | None = None,
        state_filter_fn: Callable[[str], bool] | None = None,
        *,
        layout: LayoutSetting | None = None,
        backend: str | None = None,
    ):
        check_count(num_expert_partitions, 'num_expert_partitions')
        mesh = MeshConfig.from_t5x(
            num_partitions=num_partitions,
            model_parallel_submesh=model_parallel_submesh,
            backend=backend,
            num_expert_partitions=num_expert_partitions,
        )
        super().__init__(
            mesh,
            layout,
            params_on_devices=params_on_devices,
            logical_axis_rules=logical_axis_rules,
        )
        self._num_expert_partitions = num_expert_partitions
        self._state_filter_fn = state_filter_fn

    def get_logical_axes(self, train_state: Any) -> Any:
        axes = super().get_logical_axes(train_state)
        if isinstance(self._layout, Plan) or not says_itself(train_state):
            return axes
        return _with_experts(axes, train_state, self._state_filter_fn)

    def _said_axes(self, train_state: Any) -> Any:
        return self.get_logical_axes(train_state) if says_itself(train_state) else None

    def _with_batch(self, shardings: Any) -> Any:
        return _with_batch_spec(shardings, self.data_partition_spec)


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 2,
    parameter_partitioning_dims: int = 1,
    additional_rules: LogicalAxisRules | None = None,
) -> LogicalAxisRules:
    """T5X's rules for mixtures of experts; see `partitioning.standard_logical_axis_rules`.

    Unlike the default rules of MoePjitPartitioner, they also shard the 'embed' dimension of
    activations over 'model', as T5X's do.
    """
    return rules_of_transformers(
        activation_partitioning_dims,
        parameter_partitioning_dims,
        additional_rules,
        mesh_axes=('data', 'expert', 'model'),
    )


def compute_num_model_partitions(
    num_model_partitions: int | None, model_parallel_submesh: HardwareMesh | None
) -> int:
    """The size of the 'model' axis that T5X's two settings give.

    Raises:
      ValueError: if both are None, or if they give different sizes.
    """
    if model_parallel_submesh is None:
        if num_model_partitions is None:
            raise ValueError(
                'At least one of num_model_partitions and model_parallel_submesh must be set'
            )
        return num_model_partitions
    size = math.prod(model_parallel_submesh)
    if num_model_partitions not in (None, size):
        raise ValueError(
            f'num_model_partitions={num_model_partitions} and model_parallel_submesh='
            f'{model_parallel_submesh}, which has {size} devices, are inconsistent: keep one'
        )
    return size


def override_partition_specs(resources: Any) -> Any:
    """Axis resources in which P('data') is sharded over the 'expert' axis too.

    Args:
      resources: a PartitionSpec, a sequence of them and of other resources, or anything else, which
        is returned unchanged. Trees inside a sequence are not changed.
    """
    return _with_batch_spec(resources, PartitionSpec(('data', 'expert')))


def _with_batch_spec(resources: Any, batch: PartitionSpec) -> Any:
    """Axis resources in which P('data') is replaced."""

    def replace(resource: Any) -> Any:
        is_batch = isinstance(resource, PartitionSpec) and resource == PartitionSpec('data')
        return batch if is_batch else resource

    if type(resources) in (tuple, list):
        return tuple(map(replace, resources))
    return replace(resources)


def _with_experts(axes: Any, state: Any, is_sharded: Callable[[str], bool] | None) -> Any:
    """The logical axes of a state of T5X, with 'expert' in front of the statistics of experts."""
    shapes = {
        key_names(path): shape_of(x) for path, x in jax.tree_util.tree_leaves_with_path(state)
    }

    def with_expert(path: Any, names: Any) -> Any:
        keys = key_names(path)
        if 'param_states' not in keys:
            return names
        below, shape = '/'.join(keys[keys.index('param_states') + 1 :]), shapes.get(keys, ())
        if is_sharded is None:
            # Statistics that are not factored are arrays of size 1 in T5X's Adafactor.
            chosen = _FACTORED.match(below) is not None and shape not in ((), (1,))
        else:
            chosen = is_sharded(below)
        if not chosen:
            return names
        return AxisNames('expert', *((None,) * (len(shape) - 1) if names is None else names))

    return jax.tree_util.tree_map_with_path(
        with_expert, axes, is_leaf=lambda x: x is None or type(x) is tuple
    )
