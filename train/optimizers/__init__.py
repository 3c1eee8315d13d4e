"""Optimizers: optax transformations, masks of weight decay, and Adafactor with T5X's factoring."""

from train.optimizers.optimizer import (
    LogicalAxes,
    Optimizer,
    as_transformation,
    chain,
    decay_matrices_only,
    global_norm,
    label_by_path,
    learning_rate_of,
    logical_axes_of,
    matrices_for_muon,
    share_of,
)

__all__ = [
    'LogicalAxes',
    'Optimizer',
    'as_transformation',
    'chain',
    'decay_matrices_only',
    'global_norm',
    'label_by_path',
    'learning_rate_of',
    'logical_axes_of',
    'matrices_for_muon',
    'share_of',
]
