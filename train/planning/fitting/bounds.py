"""The least memory that a run needs on a machine, from its sizes alone."""

from __future__ import annotations

from train.models.config import TransformerConfig
from train.planning.fitting.tasks import Task
from train.planning.searching import RunSizes

# The least that a parameter needs: itself and two moments of AdamW in float32, and its gradient in
# bfloat16. With microbatches, the sum of the gradients is in float32, and what is added to it may
# be, too.
_STATE, _GRADIENT, _SUM = 12, 2, 4
_ELEMENT = 2  # bytes of an activation in bfloat16


def least_peak(
    task: Task, sizes: RunSizes, num_microbatches: int, *, keeps_products: bool = False
) -> float:
    """Returns a lower bound on the memory of a device, in bytes, for all layouts.

    It has the state, the gradients, and what each layer keeps of each token, divided evenly.

    Args:
      task: what is to be trained.
      sizes: the sizes of the run on a machine.
      num_microbatches: the number of microbatches.
      keeps_products: whether the backward pass finds the results of products, which it otherwise
        computes again from the inputs of the layers.
    """
    gradient = _GRADIENT + (_SUM if num_microbatches > 1 else 0)
    state = task.model.num_parameters * (_STATE + gradient) / sizes.num_devices
    config = task.model.config
    if not isinstance(config, TransformerConfig):
        return state
    width = config.embed_dim
    if keeps_products:
        width += config.mlp_dim * (2 if config.gated_mlp else 1)
    tokens = task.batch_tokens / (sizes.num_devices * sizes.num_slices * num_microbatches)
    return state + _ELEMENT * config.num_layers * tokens * width


def expected_peak(
    task: Task, num_devices: int, num_microbatches: int, bytes_of_batch: float
) -> float:
    """Returns about how much memory a device needs, in bytes.

    Args:
      task: what is to be trained.
      num_devices: the number of devices that share the state.
      num_microbatches: the number of microbatches.
      bytes_of_batch: what a device needs for its part of a batch without microbatches.
    """
    return _fixed(task, num_devices, num_microbatches) + bytes_of_batch / num_microbatches


def bytes_of_batch(task: Task, num_devices: int, num_microbatches: int, peak: int) -> float:
    """Returns what a device would need for its part of a batch without microbatches, in bytes.

    Args:
      task: what is to be trained.
      num_devices: the number of devices that share the state.
      num_microbatches: the number of microbatches of a run whose peak is known.
      peak: its peak, in bytes.
    """
    of_batch = peak - _fixed(task, num_devices, num_microbatches)
    return max(of_batch, 0.0) * num_microbatches


def _fixed(task: Task, num_devices: int, num_microbatches: int) -> float:
    """What a device needs whatever the batch is: the state and the gradients."""
    gradient = 2 * _SUM if num_microbatches > 1 else _GRADIENT
    return task.model.num_parameters * (_STATE + gradient) / num_devices
