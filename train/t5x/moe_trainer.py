"""T5X's `contrib.moe.trainer`: the trainer of mixtures of experts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from partitioning.state import path_str
from train.errors import ConfigError, check_counts
from train.optimizers import LogicalAxes, Optimizer
from train.t5x.refusals import refusal
from train.t5x.trainer import Trainer

KEY = 'moe_trainer.MoeTrainer'
_EXPERTS = re.compile('.*expert.*')


def is_of_experts(path: str) -> bool:
    """Whether the path of a parameter, such as 'decoder/layers_1/mlp/expert/wi/kernel', has one."""
    return _EXPERTS.match(path) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeTrainer(Trainer):
    """How parameters are updated, with the gradients of experts multiplied as T5X multiplies them.

    Every mesh computes the gradients of the loss, so nothing has to be corrected. The factor is
    kept because it is part of T5X's training: it matters to optimizers without their own scale,
    such as SGD, and to clipping by the global norm. 1 leaves the gradients unchanged.

    Attributes:
      num_expert_partitions: what the gradients of experts are multiplied by.
      sharded_match_fn: whether the path of a parameter, such as
        'decoder/layers_1/mlp/expert/wi/kernel', is one of experts. None selects no parameter.

    `trainer.Trainer` describes the other attributes.
    """

    num_expert_partitions: int
    sharded_match_fn: Callable[[str], bool] | None = is_of_experts

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(**{f'{KEY}.num_expert_partitions': self.num_expert_partitions})
        if self.sharded_match_fn is not None and not callable(self.sharded_match_fn):
            why = 'it must be a function of the path of a parameter, or None'
            raise refusal(f'{KEY}.sharded_match_fn', self.sharded_match_fn, why)

    def optimizer(self, model: Any) -> Optimizer | optax.GradientTransformation:
        """The model's optimizer, which gets the gradients of experts multiplied."""
        inner, selects = super().optimizer(model), self.sharded_match_fn
        if selects is None or self.num_expert_partitions == 1:
            return inner
        if not isinstance(inner, Optimizer):
            return scale_gradients(inner, selects, self.num_expert_partitions)
        factor, given = self.num_expert_partitions, inner

        def transform(
            learning_rate: Any, logical_axes: LogicalAxes | None = None
        ) -> optax.GradientTransformation:
            tx = dataclasses.replace(given, learning_rate=learning_rate).build(logical_axes)
            return scale_gradients(tx, selects, factor)

        # The inner optimizer clips the multiplied gradients.
        return Optimizer(transform=transform, learning_rate=inner.learning_rate, clip_norm=None)


def scale_gradients(
    tx: optax.GradientTransformation, selects: Callable[[str], bool], factor: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation with the state of `tx`, whose selected gradients are multiplied.

    Args:
      tx: the transformation.
      selects: whether the gradient of the parameter at a path is multiplied.
      factor: what by.

    Raises:
      ConfigError: in the first update, if a function other than the default selects nothing.
    """
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        # As in T5X, a network without experts may be trained too.
        if selects is not is_of_experts and not any(map(selects, paths)):
            raise ConfigError(
                f'{KEY}.sharded_match_fn selects none of the {len(paths)} parameters, such as '
                f'{paths[0]!r}: use a network with experts, or trainer.Trainer'
            )
        scaled = jax.tree_util.tree_map_with_path(
            lambda path, g: g * factor if selects(path_str(path)) else g, grads
        )
        return inner.update(scaled, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
