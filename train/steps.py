"""The train step and the eval step: pure functions of a state and a batch.

A batch is a dict of [batch, length] arrays: `decoder_input_tokens`, `decoder_target_tokens` (int32)
and `decoder_loss_weights` (float32, 0 where a target does not count); of packed documents also
`decoder_segment_ids` and `decoder_positions` (int32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from partitioning import TrainState, with_sharding_constraint
from train.optimizers import Optimizer

BATCH_ARRAYS = frozenset(
    f'decoder_{name}'
    for name in ('input_tokens', 'target_tokens', 'loss_weights', 'segment_ids', 'positions')
)

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def loss_sums(
    model: Any, params: Any, batch: Batch, dropout_rng: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """Sums over the targets that count: (nats, {'nats', 'weight', 'correct'}).

    The one-hot product of the cross-entropy fuses with the softmax; gathering the target's logit
    would keep a second copy of the logits.
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
    one_hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=logits_BLV.dtype)
    nats_BL = jax.nn.logsumexp(logits_BLV, axis=-1) - jnp.sum(one_hot_BLV * logits_BLV, axis=-1)
    correct_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
    sums = {
        'nats': jnp.sum(nats_BL * weights_BL),
        'weight': jnp.sum(weights_BL),
        'correct': jnp.sum(correct_BL * weights_BL),
    }
    return sums['nats'], sums


def make_train_step(
    model: Any,
    optimizer: Optimizer,
    *,
    seed: int,
    num_microbatches: int,
    data_spec: jax.sharding.PartitionSpec,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The function that does one update.

    Args:
      model: a linen module.
      optimizer: the optimizer.
      seed: dropout of step n uses fold_in(key(seed), n), so a resumed run repeats it.
      num_microbatches: parts of a batch whose gradients are summed, in float32, before the update.
      data_spec: PartitionSpec of the batch, which microbatches keep.
    """
    tx = optimizer.build()
    use_dropout = getattr(getattr(model, 'config', None), 'dropout_rate', 0.0) > 0

    def gradients(params: Any, batch: Batch, rng: jax.Array) -> tuple[Any, Metrics]:
        grad = jax.grad(loss_sums, argnums=1, has_aux=True)
        grads, sums = grad(model, params, batch, rng if use_dropout else None)
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
        grads = jax.tree.map(lambda g, p: (g / sums['weight']).astype(p.dtype), grads, state.params)
        new_state = state.apply_gradients(grads, tx)
        metrics = {
            'loss': sums['nats'] / sums['weight'],
            'accuracy': sums['correct'] / sums['weight'],
            'gradient_norm': optax.tree.norm(grads),
            'parameter_norm': optax.tree.norm(new_state.params),
            'learning_rate': optimizer.rate(state.step),
        }
        return new_state, metrics

    return train_step


def make_eval_step(model: Any) -> Callable[[Any, Batch], Metrics]:
    """The function (params, batch) -> sums of nats, weight and correct."""
    return lambda params, batch: loss_sums(model, params, batch)[1]


def _split_batch(x: jax.Array, parts: int, spec: jax.sharding.PartitionSpec) -> jax.Array:
    """[batch, ...] -> [parts, batch / parts, ...] without moving a row to another device.

    Part m takes rows m, m + parts, ...: each device keeps the rows it has.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return with_sharding_constraint(rows, jax.sharding.PartitionSpec(None, *spec))
