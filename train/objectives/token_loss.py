"""What models of token sequences learn: the next token, or targets given inputs.

Their losses have cross-entropy, z-loss, smoothed labels and divisors. A batch has [batch, length]
arrays: `decoder_input_tokens` and `decoder_target_tokens` (int32), and `decoder_loss_weights`
(float, 0 where a target does not count). Packed rows add `decoder_segment_ids` and
`decoder_positions` (int32). Inputs are read by an encoder, or they are a prefix of the row.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from partitioning import TrainState
from train.decoding.starting import Start, start_decoder_only, start_encoder_decoder
from train.errors import ConfigError, check_fields, is_within
from train.objectives.modules import as_model
from train.objectives.objective import (
    Applied,
    Batch,
    Loss,
    Model,
    Objective,
    Variables,
    row_weights,
)
from train.output_layer import OutputSettings, score_targets

Divisor = Literal['weights', 'targets', 'sequences']


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoss(Objective):
    """Minimizes the cross-entropy of target tokens, in nats per target.

    The loss that is reported is always the plain cross-entropy, without the other terms.

    Attributes:
      model: a linen module, or a function or class that creates an nnx module from `nnx.Rngs`. It
        returns logits [batch, length, vocab]. If its `__call__` has an argument `defer_logits`, it
        returns `train.output_layer.DeferredLogits` if that is True, and whole logits never exist.
      z_loss: the coefficient of the squared log-normalizer of the softmax, added for each target.
      label_smoothing: the part of a target's probability that is spread over all other tokens.
      loss_divisor: 'weights' divides by the sum of the weights, 'targets' by the number of all
        targets including padding, 'sequences' averages over the targets of each row, or of each
        packed segment, and then over these, and a number divides by that number.
      output: how the logits and their gradients are computed, if the model defers them.
    """

    model: Any
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    loss_divisor: Divisor | float = 'weights'
    output: OutputSettings = dataclasses.field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        as_model(self.model)
        check_fields(TokenLoss, self, f'{kind}.', z_loss='[0, inf)', label_smoothing='[0, 1)')
        divisor, known = self.loss_divisor, get_args(Divisor)
        if divisor not in known and not is_within(divisor, '(0, inf)'):
            raise ConfigError(
                f'{kind}.loss_divisor is {divisor!r}: use {", ".join(map(repr, known))} or a '
                'number > 0'
            )

    @abc.abstractmethod
    def model_inputs(self, batch: Batch) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        """Returns the arguments of the model, by position and by name.

        Raises:
          ConfigError: if the batch does not have them.
        """

    @property
    def vocab_size(self) -> int | None:
        """The number of logits, if the model's `config` has it as `vocab_size`."""
        return getattr(getattr(self.model, 'config', None), 'vocab_size', None)

    def count_logits(self, state: TrainState, batch: Mapping[str, Any]) -> int:
        """Returns the size of the model's vocabulary, for which it traces the model."""
        arguments = state.params, batch, None, state.flax_mutables or {}
        logits = jax.eval_shape(lambda *a: self._apply(*a).outputs, *arguments)
        return logits.shape[-1]

    @functools.cached_property
    def _model(self) -> Model:
        return as_model(self.model)

    def _apply(self, params: Any, batch: Batch, rng: Any, variables: Variables) -> Applied:
        args, kwargs = self.model_inputs(batch)
        deferring = {'defer_logits': True} if self._model.takes('defer_logits') else {}
        variables = {'params': params, **variables}
        applied = self._model.apply(variables, rng, *args, **kwargs, **deferring)
        _check_logits(applied.outputs, batch)
        return applied

    def init(self, key: jax.Array, batch: Batch) -> Variables:
        args, kwargs = self.model_inputs(batch)
        return self._model.init(key, *args, **kwargs)

    def loss(self, params: Any, batch: Batch, rng: jax.Array | None, variables: Variables) -> Loss:
        applied = self._apply(params, batch, rng, variables)
        targets_BL, weights_BL = batch['decoder_target_tokens'], self.weights(batch)
        scores = score_targets(applied.outputs, targets_BL, self.output)
        sums = {
            'weight': jnp.sum(weights_BL),
            'loss': jnp.sum(scores.nats_BL * weights_BL),
            'accuracy': jnp.sum((scores.argmax_BL == targets_BL) * self.counts(weights_BL)),
        }
        sums = applied.add_sown(sums)
        total = sums['loss']
        if applied.auxiliary_loss is not None:
            # It is a mean, which the divisor must not change.
            total += applied.auxiliary_loss * self.divisor(sums, batch)
        if self.z_loss:
            sums['z_loss'] = self.z_loss * jnp.sum(jnp.square(scores.log_z_BL) * weights_BL)
            total += sums['z_loss']
        if self.label_smoothing:
            num_tokens = applied.outputs.shape[-1]
            per_token = self.label_smoothing / (num_tokens - 1)
            # Moves probability from the target to every other token.
            moved_BL = (self.label_smoothing + per_token) * scores.logit_BL
            moved_BL -= per_token * scores.logit_sum_BL
            # The loss is 0 for a model that predicts the smoothed labels: this is their entropy.
            kept = 1 - self.label_smoothing
            moved_BL -= -kept * math.log(kept) - self.label_smoothing * math.log(per_token)
            total += jnp.sum(moved_BL * weights_BL)
        return Loss(total, sums, applied.variables)

    def divisor(self, sums: Mapping[str, jax.Array], batch: Batch) -> jax.Array | float:
        if self.loss_divisor in ('weights', 'sequences'):
            return sums['weight']
        if self.loss_divisor == 'targets':
            return batch['decoder_target_tokens'].size
        return float(self.loss_divisor)

    def weights(self, batch: Batch) -> jax.Array:
        """Returns the weight of each target, float32 [batch, length].

        Without `decoder_loss_weights`, targets other than padding have the weight 1; if the divisor
        is a number, all targets have.
        """
        if (weights_BL := batch.get('decoder_loss_weights')) is None:
            targets_BL = batch['decoder_target_tokens']
            counts = targets_BL > 0 if isinstance(self.loss_divisor, str) else targets_BL >= 0
            weights_BL = counts * row_weights(batch)[:, None]
        weights_BL = weights_BL.astype(jnp.float32)
        if self.loss_divisor != 'sequences':
            return weights_BL
        sums_BL = _sums_of_sequences(weights_BL, batch.get('decoder_segment_ids'))
        return weights_BL / jnp.where(sums_BL > 0, sums_BL, 1.0)

    def counts(self, weights_BL: jax.Array) -> jax.Array:
        """Returns how much each target counts for the accuracy, float32 [batch, length]."""
        return weights_BL

    def score(self, params: Any, batch: Batch, variables: Variables | None = None) -> jax.Array:
        """Returns the log-probability of the targets of each row, float32 [batch]."""
        applied = self._apply(params, batch, None, variables or {})
        scores = score_targets(applied.outputs, batch['decoder_target_tokens'], self.output)
        plain = dataclasses.replace(self, loss_divisor='weights')
        return -jnp.sum(scores.nats_BL * plain.weights(batch), axis=-1)


def check_arrays(
    kind: str, batch: Batch, needed: Sequence[str], task: str, others: Sequence[str] | None = None
) -> None:
    """Checks that a batch has the arrays that an objective of this kind needs.

    `others` are the names of the other arrays that a batch may have; by default, it may have any.
    The message names the task to use instead.
    """
    unknown = [] if others is None else batch.keys() - {*needed, *others, 'row_weights'}
    if unknown or any(name not in batch for name in needed):
        raise ConfigError(
            f'{kind} needs the arrays {", ".join(needed)}, but the rows of the task have '
            f'{", ".join(sorted(batch))}: use {task}, or another objective'
        )


def _check_logits(logits: Any, batch: Mapping[str, Any]) -> None:
    shape, tokens_shape = getattr(logits, 'shape', None), batch['decoder_input_tokens'].shape
    if shape is None or shape[:-1] != tokens_shape:
        shown = f'a {type(logits).__name__}' if shape is None else f'an array of shape {shape}'
        raise ConfigError(
            f'the model returns {shown} for tokens of shape {tokens_shape}: it must return logits '
            '[batch, length, vocab]'
        )


def _sums_of_sequences(weights_BL: jax.Array, segments_BL: jax.Array | None) -> jax.Array:
    """Returns, for each target, the sum of the weights in its row or segment, [batch, length]."""
    if segments_BL is None:
        return jnp.sum(weights_BL, axis=-1, keepdims=True)

    def of_row(weights_L: jax.Array, segments_L: jax.Array) -> jax.Array:
        # A row of L tokens has at most L segments, and 0 is padding.
        sums = jax.ops.segment_sum(weights_L, segments_L, num_segments=len(segments_L) + 1)
        return sums[segments_L]

    return jax.vmap(of_row)(weights_BL, segments_BL)


ARRAYS = ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights')
# The arguments of the model that describe packed documents, and their arrays.
PACKED_ARGUMENTS = {'positions_BL': 'decoder_positions', 'segments_BL': 'decoder_segment_ids'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken(TokenLoss):
    """Minimizes the cross-entropy of the next token, in nats per target.

    It has the attributes of `TokenLoss`. The model maps tokens [batch, length] to logits [batch,
    length, vocab]. To train on packed documents, it also takes `positions_BL` and `segments_BL`.
    """

    def model_inputs(self, batch: Batch) -> tuple[tuple[jax.Array], dict[str, jax.Array]]:
        check_arrays(type(self).__name__, batch, ARRAYS, 'CausalLM', (*PACKED_ARGUMENTS.values(),))
        packed = {k: batch[name] for k, name in PACKED_ARGUMENTS.items() if name in batch}
        return (batch['decoder_input_tokens'],), packed


DECODER = ('decoder_input_tokens', 'decoder_target_tokens')
PACKED_DECODER = ('decoder_segment_ids', 'decoder_positions')
ENCODER_DECODER = ('encoder_input_tokens', *DECODER)
PACKED = ('encoder_segment_ids', 'encoder_positions', *PACKED_DECODER)
PREFIX = 'decoder_causal_attention'


def _choose(
    objective: TokenLoss, batch: Batch, architecture: str, needed: tuple, others: tuple
) -> dict[str, jax.Array]:
    """The arrays that a model needs, and the others that it takes if the batch has them."""
    task = f'a task with architecture = {architecture!r}'
    check_arrays(type(objective).__name__, batch, needed, task)
    return {name: batch[name] for name in (*needed, *others) if name in batch}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoder(TokenLoss):
    """Minimizes the cross-entropy of targets, given inputs that an encoder reads.

    It has the attributes of `TokenLoss`. The model is called like `train.models.t5.T5`, with
    the arrays of the batch that `encoder_decoder` rows have, by name.
    """

    def model_inputs(self, batch: Batch) -> tuple[tuple[()], dict[str, jax.Array]]:
        return (), _choose(self, batch, 'encoder_decoder', ENCODER_DECODER, PACKED)

    def start_decoding(self, variables: Variables, batch: Batch, **options: Any) -> Start:
        """Starts the decoding of a batch, with the options of `start_encoder_decoder`."""
        return start_encoder_decoder(self.model, variables, batch, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLanguageModel(TokenLoss):
    """Minimizes the cross-entropy of targets, given inputs before them in the same row.

    The model is called like `train.models.t5.DecoderOnly`, with the arrays of the batch that
    `decoder_only` rows have, by name. `TokenLoss` describes the other attributes.

    Attributes:
      bidirectional_prefix: whether the inputs see each other in both directions.
    """

    bidirectional_prefix: bool = True

    def model_inputs(self, batch: Batch) -> tuple[tuple[()], dict[str, jax.Array]]:
        others = (*PACKED_DECODER, *([PREFIX] if self.bidirectional_prefix else []))
        return (), _choose(self, batch, 'decoder_only', DECODER, others)

    def start_decoding(self, variables: Variables, batch: Batch, **options: Any) -> Start:
        """Starts the decoding of a batch, with the options of `start_decoder_only`."""
        options['bidirectional_prefix'] = self.bidirectional_prefix
        return start_decoder_only(self.model, variables, batch, **options)
