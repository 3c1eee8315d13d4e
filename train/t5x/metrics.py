"""T5X's metrics of training steps and evaluations, by T5X's names.

T5X's loss is what it minimizes: divided by `loss_normalizing_factor`, with the z-loss and smoothed
labels. It is the mean over the steps, or batches, of a record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from train.objectives import EncoderDecoder, Loss, PrefixLanguageModel, TokenLoss
from train.objectives.objective import Batch, Ratio, Variables, row_weights

# What becomes metrics with other names; all other sums are means over the targets.
_OWN = ('loss', 'z_loss', 'accuracy', 'weight', 'total', 'counted')
_SEGMENTS = '_segment_ids'
_TOKENS = ('encoder_input_tokens', 'decoder_target_tokens')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithT5XMetrics(TokenLoss):
    """A loss with T5X's metrics."""

    averages = True

    def loss(self, params: Any, batch: Batch, rng: jax.Array | None, variables: Variables) -> Loss:
        found = super().loss(params, batch, rng, variables)
        counted = jnp.sum(self.weights(batch) != 0, dtype=jnp.float32)
        sums = {**found.sums, 'total': found.total, 'counted': counted}
        return found._replace(sums=sums)

    def counts(self, weights_BL: jax.Array) -> jax.Array:
        return (weights_BL != 0).astype(jnp.float32)  # T5X's accuracy does not weigh targets.

    def metrics(self, sums: Mapping[str, jax.Array], batch: Batch) -> dict[str, Any]:
        divisor, weight = self.divisor(sums, batch), sums['weight']
        loss, z_loss = sums['total'] / divisor, sums.get('z_loss', 0.0) / divisor
        size = row_weights(batch).sum() * batch['decoder_target_tokens'].shape[1]
        others = {k: Ratio(x, weight) for k, x in sums.items() if k not in _OWN}
        return others | _fill_of(batch) | {
            'accuracy': Ratio(sums['accuracy'], sums['counted']),
            'loss': Ratio(loss, 1.0),
            'loss_per_nonpadding_target_token': Ratio(loss, weight),
            'loss_per_all_target_tokens': Ratio(loss, size),
            'z_loss': Ratio(z_loss, 1.0),
            'z_loss_per_all_target_tokens': Ratio(z_loss, size),
            'cross_ent_loss': Ratio(loss - z_loss, 1.0),
            'cross_ent_loss_per_all_target_tokens': Ratio(loss - z_loss, size),
            'non_padding_fraction/loss_weights': Ratio(weight, size),
        }  # fmt: skip


def _fill_of(batch: Batch) -> dict[str, Ratio]:
    """How many examples a batch has, and which part of it is not padding, for each feature."""
    rows = row_weights(batch)
    ids = {k.removesuffix(_SEGMENTS): x for k, x in batch.items() if k.endswith(_SEGMENTS)}
    ids = ids or {k: batch[k] != 0 for k in _TOKENS if k in batch}
    found, filled, size = dict[str, Ratio](), jnp.float32(0), jnp.float32(0)
    for name, ids_BL in ids.items():
        ids_BL = ids_BL.astype(jnp.int32)
        # Each example of a row has another number; padding, at the end of the row, has 0.
        changes = jnp.sum(jnp.diff(ids_BL, axis=1) != 0) - jnp.sum(ids_BL[:, -1] == 0)
        examples = (changes + ids_BL.shape[0]).astype(jnp.float32)
        one, whole = jnp.sum(ids_BL != 0, dtype=jnp.float32), rows.sum() * ids_BL.shape[1]
        found[f'effective_batch_size/{name}'] = Ratio(examples, 1.0)
        found[f'non_padding_fraction/{name}'] = Ratio(one, whole)
        filled, size = filled + one, size + whole
    return found | {'non_padding_fraction/overall': Ratio(filled, size)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5XEncoderDecoder(_WithT5XMetrics, EncoderDecoder):
    """`EncoderDecoder` with T5X's metrics."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5XPrefixLanguageModel(_WithT5XMetrics, PrefixLanguageModel):
    """`PrefixLanguageModel` with T5X's metrics."""
