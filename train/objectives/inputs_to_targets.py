"""Targets given inputs, with the models of T5: an encoder-decoder, or a decoder with a prefix."""

from __future__ import annotations

import dataclasses

import jax

from train.decoding.starting import Start, start_decoder_only, start_encoder_decoder
from train.objectives.objective import Batch, Variables
from train.objectives.token_loss import TokenLoss, check_arrays

DECODER = ('decoder_input_tokens', 'decoder_target_tokens')
PACKED_DECODER = ('decoder_segment_ids', 'decoder_positions')
ENCODER_DECODER = ('encoder_input_tokens', *DECODER)
PACKED = ('encoder_segment_ids', 'encoder_positions', *PACKED_DECODER)
PREFIX = 'decoder_causal_attention'


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoder(TokenLoss):
    """Minimizes the cross-entropy of targets, given inputs that an encoder reads.

    The attributes are those of `TokenLoss`. The model is called like `train.models.t5.T5`, with
    the arrays of the batch that `encoder_decoder` rows have, by name.
    """

    def model_inputs(self, batch: Batch) -> tuple[tuple[()], dict[str, jax.Array]]:
        task = "a task with architecture = 'encoder_decoder'"
        check_arrays(type(self).__name__, batch, ENCODER_DECODER, task)
        names = (*ENCODER_DECODER, *PACKED)
        return (), {name: batch[name] for name in names if name in batch}

    def start_decoding(
        self,
        variables: Variables,
        batch: Batch,
        *,
        prompt_with_targets: bool = False,
        end_token: int | None = None,
    ) -> Start:
        """Starts the decoding of a batch, see `start_encoder_decoder`."""
        return start_encoder_decoder(
            self.model,
            variables,
            batch,
            prompt_with_targets=prompt_with_targets,
            end_token=end_token,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLanguageModel(TokenLoss):
    """Minimizes the cross-entropy of targets, given inputs before them in the same row.

    The model is called like `train.models.t5.DecoderOnly`, with the arrays of the batch that
    `decoder_only` rows have, by name. The other attributes are those of `TokenLoss`.

    Attributes:
      bidirectional_prefix: whether the inputs see each other in both directions.
    """

    bidirectional_prefix: bool = True

    def model_inputs(self, batch: Batch) -> tuple[tuple[()], dict[str, jax.Array]]:
        task = "a task with architecture = 'decoder_only'"
        check_arrays(type(self).__name__, batch, DECODER, task)
        names = (*DECODER, *PACKED_DECODER, *([PREFIX] if self.bidirectional_prefix else []))
        return (), {name: batch[name] for name in names if name in batch}

    def start_decoding(
        self,
        variables: Variables,
        batch: Batch,
        *,
        prompt_with_targets: bool = False,
        end_token: int | None = None,
    ) -> Start:
        """Starts the decoding of a batch, see `start_decoder_only`."""
        return start_decoder_only(
            self.model,
            variables,
            batch,
            bidirectional_prefix=self.bidirectional_prefix,
            prompt_with_targets=prompt_with_targets,
            end_token=end_token,
        )
