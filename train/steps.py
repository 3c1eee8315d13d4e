"""The train step and the eval step: pure functions of a state and a batch.

A batch is a dict of [batch, length] arrays: `decoder_input_tokens` and `decoder_target_tokens`
(int32), and `decoder_loss_weights` (float32, 0 where a target does not count). Packed documents add
`decoder_segment_ids` and `decoder_positions` (int32).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import gin
import jax
import jax.numpy as jnp
import optax

from partitioning import TrainState, with_sharding_constraint
from partitioning.state import path_str
from train.errors import ConfigError
from train.optimizers import Optimizer

BATCH_ARRAYS = frozenset(
    f'decoder_{name}'
    for name in ('input_tokens', 'target_tokens', 'loss_weights', 'segment_ids', 'positions')
)

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Terms that training adds to the cross-entropy, and the divisor of the sum over a batch.

    Metrics and evaluations always report the plain cross-entropy, in nats per target.

    Attributes:
      z_loss: the coefficient of the squared log-normalizer of the softmax, added for each target.
      label_smoothing: the part of a target's probability that is spread over all other tokens.
      divisor: 'weights' divides by the number of targets that count, 'targets' by the number of all
        targets including padding, and a number divides by that number.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    divisor: Literal['weights', 'targets'] | float = 'weights'

    def __post_init__(self) -> None:
        for name, bound in (('z_loss', math.inf), ('label_smoothing', 1.0)):
            if not _is_number(value := getattr(self, name)) or not 0 <= value < bound:
                below = '' if bound == math.inf else f' and < {bound:g}'
                raise ConfigError(f'LossConfig.{name} is {value!r}: it must be >= 0{below}')
        divisor: Any = self.divisor
        positive = _is_number(divisor) and 0 < divisor < math.inf
        if not positive and divisor not in ('weights', 'targets'):
            raise ConfigError(
                f"LossConfig.divisor is {divisor!r}: use 'weights', 'targets' or a number > 0"
            )

    def divide_by(self, sums: Metrics, batch: Batch) -> jax.Array | float:
        """Returns the divisor of the sums over a whole batch."""
        if self.divisor == 'weights':
            return sums['weight']
        return batch['decoder_target_tokens'].size if self.divisor == 'targets' else self.divisor


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def loss_sums(
    model: Any,
    params: Any,
    batch: Batch,
    dropout_rng: jax.Array | None = None,
    loss: LossConfig | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns the loss of a batch, summed over the targets that count.

    Args:
      model: a linen module.
      params: its parameters.
      batch: see the top of this file.
      dropout_rng: the random key of the dropout. None disables dropout.
      loss: the terms of the loss. By default, the loss is the cross-entropy.

    Returns:
      The loss, and the sums 'nats', 'weight' and 'correct'; with a z-loss also 'z_loss'.
    """
    packed = {}
    if 'decoder_segment_ids' in batch:
        packed['positions_BL'] = batch['decoder_positions']
        packed['segments_BL'] = batch['decoder_segment_ids']
    logits_BLV = model.apply(
        {'params': params},
        batch['decoder_input_tokens'],
        **packed,
        deterministic=dropout_rng is None,
        rngs=None if dropout_rng is None else {'dropout': dropout_rng},
    )
    targets_BL, weights_BL = batch['decoder_target_tokens'], batch['decoder_loss_weights']
    # The product with one-hot targets fuses with the softmax. Gathering the target's logit would
    # keep a second copy of the logits.
    one_hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=logits_BLV.dtype)
    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    logit_BL = jnp.sum(one_hot_BLV * logits_BLV, axis=-1)
    nats_BL = log_z_BL - logit_BL
    correct_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
    sums = {
        'nats': jnp.sum(nats_BL * weights_BL),
        'weight': jnp.sum(weights_BL),
        'correct': jnp.sum(correct_BL * weights_BL),
    }
    total = sums['nats']
    if loss is not None and loss.z_loss:
        sums['z_loss'] = loss.z_loss * jnp.sum(jnp.square(log_z_BL) * weights_BL)
        total += sums['z_loss']
    if loss is not None and loss.label_smoothing:
        per_token = loss.label_smoothing / (logits_BLV.shape[-1] - 1)
        # Moves probability from the target to every other token.
        moved_BL = (loss.label_smoothing + per_token) * logit_BL
        moved_BL -= per_token * jnp.sum(logits_BLV, axis=-1)
        total += jnp.sum(moved_BL * weights_BL)
    return total, sums


def make_train_step(
    model: Any,
    optimizer: Optimizer,
    *,
    seed: int,
    num_microbatches: int,
    data_spec: jax.sharding.PartitionSpec,
    loss: LossConfig | None = None,
    weight_metrics: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the function (state, batch) -> (state, metrics) that does one update.

    Args:
      model: a linen module.
      optimizer: the optimizer.
      seed: the seed of the dropout. Step n uses fold_in(key(seed), n), so a resumed run repeats it.
      num_microbatches: the number of parts of a batch. Their gradients are computed one after
        another and summed in float32 before the update.
      data_spec: the PartitionSpec of the batch, which microbatches keep.
      loss: the loss to minimize, by default `LossConfig()`.
      weight_metrics: whether to add the metrics of every parameter, see `per_parameter_metrics`.
    """
    loss = loss or LossConfig()
    tx = optimizer.build()
    use_dropout = getattr(getattr(model, 'config', None), 'dropout_rate', 0.0) > 0

    def gradients(params: Any, batch: Batch, rng: jax.Array) -> tuple[Any, Metrics]:
        grad = jax.grad(loss_sums, argnums=1, has_aux=True)
        grads, sums = grad(model, params, batch, rng if use_dropout else None, loss)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        if num_microbatches == 1:
            grads, sums = gradients(state.params, batch, rng)
        else:
            parts = jax.tree.map(lambda x: _split_batch(x, num_microbatches, data_spec), batch)

            def add(total: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
                new = gradients(state.params, part[0], jax.random.fold_in(rng, part[1]))
                return jax.tree.map(jnp.add, total, new), None

            first = jax.tree.map(lambda x: x[0], parts)
            shapes = jax.eval_shape(gradients, state.params, first, rng)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (grads, sums), _ = jax.lax.scan(add, zeros, (parts, jnp.arange(num_microbatches)))
        divisor = loss.divide_by(sums, batch)
        grads = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), grads, state.params)
        new_state = state.apply_gradients(grads, tx)
        metrics = {
            'loss': sums['nats'] / sums['weight'],
            'accuracy': sums['correct'] / sums['weight'],
            'gradient_norm': optax.tree.norm(grads),
            'parameter_norm': optax.tree.norm(new_state.params),
            'learning_rate': optimizer.rate(state.step),
        }
        if 'z_loss' in sums:
            metrics['z_loss'] = sums['z_loss'] / sums['weight']
        if weight_metrics:
            metrics |= per_parameter_metrics(state.params, grads, new_state.params)
        return new_state, metrics

    return train_step


def per_parameter_metrics(before: Any, grads: Any, after: Any) -> Metrics:
    """Returns T5X's weight metrics: the RMS of weights, gradients and updates, and max |weight|."""

    def rms(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

    updates = jax.tree.map(jnp.subtract, after, before)
    measured = {
        'weight_rms': jax.tree.map(rms, after),
        'weight_gradient_rms': jax.tree.map(rms, grads),
        'weight_update_rms': jax.tree.map(rms, updates),
        'weight_max': jax.tree.map(lambda x: jnp.max(jnp.abs(x)), after),
    }
    leaves = jax.tree_util.tree_leaves_with_path
    return {
        f'{name}/{path_str(path)}': value
        for name, tree in measured.items()
        for path, value in leaves(tree)
    }


def make_eval_step(model: Any) -> Callable[[Any, Batch], Metrics]:
    """Returns the function (params, batch) -> the sums 'nats', 'weight' and 'correct'."""
    return lambda params, batch: loss_sums(model, params, batch)[1]


def _split_batch(x: jax.Array, parts: int, spec: jax.sharding.PartitionSpec) -> jax.Array:
    """Reshapes [batch, ...] to [parts, batch / parts, ...] without moving rows between devices.

    Part m takes the rows m, m + parts, ..., so each device keeps its rows.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return with_sharding_constraint(rows, jax.sharding.PartitionSpec(None, *spec))
