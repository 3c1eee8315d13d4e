"""Optimizers: optax transformations, weight-decay masks, averages, and T5X's Adafactor."""

from train.optimizers.averaging import (
    AveragedState as AveragedState,
    start_average as start_average,
    update_average as update_average,
    with_average as with_average,
)
from train.optimizers.optimizer import (
    LogicalAxes as LogicalAxes,
    Optimizer as Optimizer,
    as_transformation as as_transformation,
    chain as chain,
    decay_matrices_only as decay_matrices_only,
    global_norm as global_norm,
    label_by_path as label_by_path,
    learning_rate_of as learning_rate_of,
    logical_axes_of as logical_axes_of,
    matrices_for_muon as matrices_for_muon,
    share_of as share_of,
)
