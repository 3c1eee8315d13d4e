"""Language modeling: the cross-entropy of each token, given the tokens before it.

A batch has [batch, length] arrays: `decoder_input_tokens` and `decoder_target_tokens` (int32), and
`decoder_loss_weights` (float32, 0 where a target does not count). Packed documents add
`decoder_segment_ids` and `decoder_positions` (int32).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from partitioning import TrainState
from train.errors import ConfigError
from train.objectives.model import Applied, Model, as_model
from train.objectives.objective import Batch, Loss, Objective, Variables

ARRAYS = ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights')
# The arguments of the model that describe packed documents, and their arrays.
PACKED = {'positions_BL': 'decoder_positions', 'segments_BL': 'decoder_segment_ids'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken(Objective):
    """Minimizes the cross-entropy of the next token, in nats per target.

    The loss that is reported is always the plain cross-entropy, without the other terms.

    Attributes:
      model: a linen module, or a function or class that creates an nnx module from `nnx.Rngs`. It
        maps tokens [batch, length] to logits [batch, length, vocab]. To train on packed documents,
        it also takes `positions_BL` and `segments_BL`.
      z_loss: the coefficient of the squared log-normalizer of the softmax, added for each target.
      label_smoothing: the part of a target's probability that is spread over all other tokens.
      loss_divisor: 'weights' divides by the number of targets that count, 'targets' by the number
        of all targets including padding, and a number divides by that number.
    """

    model: Any
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    loss_divisor: Literal['weights', 'targets'] | float = 'weights'

    def __post_init__(self) -> None:
        as_model(self.model)
        for name, bound in (('z_loss', math.inf), ('label_smoothing', 1.0)):
            if not _is_number(value := getattr(self, name)) or not 0 <= value < bound:
                below = '' if bound == math.inf else f' and < {bound:g}'
                raise ConfigError(f'NextToken.{name} is {value!r}: it must be >= 0{below}')
        divisor: Any = self.loss_divisor
        positive = _is_number(divisor) and 0 < divisor < math.inf
        if not positive and divisor not in ('weights', 'targets'):
            raise ConfigError(
                f"NextToken.loss_divisor is {divisor!r}: use 'weights', 'targets' or a number > 0"
            )

    @property
    def vocab_size(self) -> int | None:
        """The number of logits, if the model's `config` has it as `vocab_size`."""
        return getattr(getattr(self.model, 'config', None), 'vocab_size', None)

    def count_logits(self, state: TrainState, batch: Mapping[str, Any]) -> int:
        """Returns the size of the model's vocabulary, for which it traces the model."""
        arguments = state.params, batch, None, state.flax_mutables or {}
        logits = jax.eval_shape(lambda *a: self._apply(*a).outputs, *arguments)
        _check_logits(logits, batch)
        return logits.shape[-1]

    @functools.cached_property
    def _model(self) -> Model:
        return as_model(self.model)

    def _apply(self, params: Any, batch: Batch, rng: Any, variables: Variables) -> Applied:
        packed = {k: batch[name] for k, name in PACKED.items() if name in batch}
        variables = {'params': params, **variables}
        return self._model.apply(variables, rng, batch['decoder_input_tokens'], **packed)

    def init(self, key: jax.Array, batch: Batch) -> Variables:
        _check_arrays(batch)
        return self._model.init(key, batch['decoder_input_tokens'])

    def loss(self, params: Any, batch: Batch, rng: jax.Array | None, variables: Variables) -> Loss:
        _check_arrays(batch)
        applied = self._apply(params, batch, rng, variables)
        logits_BLV = applied.outputs
        _check_logits(logits_BLV, batch)
        targets_BL, weights_BL = batch['decoder_target_tokens'], batch['decoder_loss_weights']
        nats_BL, log_z_BL, logit_BL = cross_entropy(logits_BLV, targets_BL)
        correct_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
        sums = {
            'weight': jnp.sum(weights_BL),
            'loss': jnp.sum(nats_BL * weights_BL),
            'accuracy': jnp.sum(correct_BL * weights_BL),
        }
        sums = applied.add_sown(sums)
        total = sums['loss'] + sums.get('auxiliary_loss', 0.0)
        if self.z_loss:
            sums['z_loss'] = self.z_loss * jnp.sum(jnp.square(log_z_BL) * weights_BL)
            total += sums['z_loss']
        if self.label_smoothing:
            per_token = self.label_smoothing / (logits_BLV.shape[-1] - 1)
            # Moves probability from the target to every other token.
            moved_BL = (self.label_smoothing + per_token) * logit_BL
            moved_BL -= per_token * jnp.sum(logits_BLV, axis=-1)
            total += jnp.sum(moved_BL * weights_BL)
        return Loss(total, sums, applied.variables)

    def divisor(self, sums: Mapping[str, jax.Array], batch: Batch) -> jax.Array | float:
        if self.loss_divisor == 'weights':
            return sums['weight']
        if self.loss_divisor == 'targets':
            return batch['decoder_target_tokens'].size
        return self.loss_divisor


def _check_arrays(batch: Batch) -> None:
    unknown = sorted(batch.keys() - {*ARRAYS, *PACKED.values(), 'row_weights'})
    missing = [name for name in ARRAYS if name not in batch]
    if unknown or missing:
        raise ConfigError(
            f'NextToken needs the arrays {", ".join(ARRAYS)}, but the rows of the task '
            f'have {", ".join(sorted(batch))}: use CausalLM, or another objective'
        )


def _check_logits(logits: Any, batch: Mapping[str, Any]) -> None:
    shape, tokens_shape = getattr(logits, 'shape', None), batch['decoder_input_tokens'].shape
    if shape is None or shape[:-1] != tokens_shape:
        shown = f'a {type(logits).__name__}' if shape is None else f'an array of shape {shape}'
        raise ConfigError(
            f'the model returns {shown} for tokens of shape {tokens_shape}: it must return logits '
            '[batch, length, vocab]'
        )


def cross_entropy(
    logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the nats of each target, the log-normalizers, and the logits of the targets."""
    # The product with one-hot targets fuses with the softmax. Gathering the target's logit would
    # keep a second copy of the logits.
    one_hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=logits_BLV.dtype)
    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    logit_BL = jnp.sum(one_hot_BLV * logits_BLV, axis=-1)
    return log_z_BL - logit_BL, log_z_BL, logit_BL


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
