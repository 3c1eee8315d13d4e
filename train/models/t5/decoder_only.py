"""A decoder-only transformer with T5's layers, whose prefix can see itself in both directions."""

from __future__ import annotations

import flax.linen as nn
import jax

from train.models.t5.attention import decoder_mask
from train.models.t5.config import DecoderOnlyConfig
from train.models.t5.stack import Decoder
from train.output_layer import DeferredLogits


class DecoderOnly(nn.Module):
    """A decoder-only transformer: maps tokens to the float32 logits of the next token.

    Parameters have T5X's paths and shapes, so its checkpoints fit.
    """

    config: DecoderOnlyConfig

    def setup(self) -> None:
        self.decoder = Decoder(self.config.layer_config())

    def __call__(
        self,
        decoder_input_tokens: jax.Array,
        decoder_target_tokens: jax.Array,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        decoder_causal_attention: jax.Array | None = None,
        *,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        prefill: bool = False,
        prefill_lengths: jax.Array | None = None,
        defer_logits: bool = False,
    ) -> jax.Array | DeferredLogits:
        """Computes the logits.

        Args:
          decoder_causal_attention: 1 in the prefix, whose positions see each other in both
            directions.
          prefill: whether this call fills the cache with `prefill_lengths` positions of each row.
            Later positions of the row are computed but not cached.
          prefill_lengths: int32 [batch].

        `T5.decode` describes the other arguments.

        Returns:
          float32 [batch, length, vocab_size], or what computes it.
        """
        mask = None
        if not decode:
            mask = decoder_mask(
                decoder_target_tokens, decoder_segment_ids, decoder_causal_attention
            )
        deferred = self.decoder(
            decoder_input_tokens,
            mask,
            prefill_lengths=prefill_lengths,
            deterministic=deterministic,
            decode=decode,
            max_decode_length=max_decode_length,
            prefill=prefill,
        )
        return deferred if defer_logits else deferred.logits('replicate' if decode else None)
