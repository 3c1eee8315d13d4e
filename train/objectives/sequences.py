"""What models of token sequences learn: the next token, or targets given inputs.

Inputs are read by an encoder, or they are a prefix of the row that a decoder reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from train.decoding.starting import Start, start_decoder_only, start_encoder_decoder
from train.objectives.objective import Batch, Variables
from train.objectives.token_loss import TokenLoss, check_arrays

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
