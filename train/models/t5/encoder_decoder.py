"""The networks with T5's layers: an encoder-decoder, and a decoder whose prefix can see itself.

Suffixes of array names: B batch, L length, S length of the encoder, E embed, V vocab.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.t5.attention import decoder_mask, pair_mask, segment_mask
from train.models.t5.config import DecoderOnlyConfig, T5Config
from train.models.t5.layers import Embed
from train.models.t5.stack import Decoder, Encoder
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


class T5(nn.Module):
    """An encoder-decoder: maps inputs and targets to the float32 logits of the targets.

    Parameters have T5X's paths and shapes, so T5X's checkpoints fit. Positions are accepted but not
    used, because the network only depends on the distances between tokens of a row.
    """

    config: T5Config

    def setup(self) -> None:
        self.token_embedder = Embed(self.config)
        self.encoder = Encoder(self.config, self.token_embedder)
        self.decoder = Decoder(self.config, self.token_embedder)

    def encode(
        self,
        encoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        encoder_positions: jax.Array | None = None,
        *,
        deterministic: bool = False,
    ) -> jax.Array:
        """Encodes the inputs: int32 [batch, length] to [batch, length, emb_dim]."""
        real = encoder_input_tokens > 0
        mask = pair_mask(real, real)
        if encoder_segment_ids is not None:
            mask &= segment_mask(encoder_segment_ids, encoder_segment_ids)
        return self.encoder(encoder_input_tokens, mask, deterministic)

    def decode(
        self,
        encoded: jax.Array,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        decoder_target_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        *,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        defer_logits: bool = False,
    ) -> jax.Array | DeferredLogits:
        """Computes the logits of the targets from the encoded inputs.

        Args:
          encoded: what `encode` returned.
          encoder_input_tokens: the inputs, for their padding.
          decoder_input_tokens: the targets, shifted right. While decoding with a cache, the last
            token of each row, [batch, 1].
          decoder_target_tokens: the targets; 0 is padding. While decoding, only their shape counts.
          encoder_segment_ids: the segments of packed inputs.
          decoder_segment_ids: the segments of packed targets.
          decoder_positions: not used.
          deterministic: whether dropout is turned off.
          decode: whether keys and values are cached, in the collection 'cache'. The first call
            creates a cache of the length of `decoder_input_tokens`.
          max_decode_length: the length of the cache. Needed in calls with a cache.
          defer_logits: whether to return `DeferredLogits` instead of the logits.

        Returns:
          The logits, float32 [batch, length, vocab_size], or their `DeferredLogits`.
        """
        if encoder_segment_ids is not None and decoder_segment_ids is None:
            raise ValueError('encoder_segment_ids without decoder_segment_ids: pass both')
        inputs = encoder_input_tokens > 0
        if decode:
            if decoder_segment_ids is not None:
                raise ValueError('packed rows cannot be decoded: pass no segment ids')
            mask, queries = None, jnp.ones_like(decoder_target_tokens, bool)
        else:
            mask = decoder_mask(decoder_target_tokens, decoder_segment_ids)
            queries = decoder_target_tokens > 0
        cross_mask = pair_mask(queries, inputs)
        if encoder_segment_ids is not None and decoder_segment_ids is not None:
            cross_mask &= segment_mask(decoder_segment_ids, encoder_segment_ids)
        deferred = self.decoder(
            decoder_input_tokens,
            mask,
            encoded,
            cross_mask,
            deterministic=deterministic,
            decode=decode,
            max_decode_length=max_decode_length,
        )
        return deferred if defer_logits else deferred.logits('replicate' if decode else None)

    def __call__(
        self,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        decoder_target_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        encoder_positions: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        *,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        defer_logits: bool = False,
    ) -> jax.Array | DeferredLogits:
        """Encodes the inputs and computes the logits; see `encode` and `decode`."""
        encoded = self.encode(
            encoder_input_tokens, encoder_segment_ids, deterministic=deterministic
        )
        return self.decode(
            encoded,
            encoder_input_tokens,
            decoder_input_tokens,
            decoder_target_tokens,
            encoder_segment_ids,
            decoder_segment_ids,
            deterministic=deterministic,
            decode=decode,
            max_decode_length=max_decode_length,
            defer_logits=defer_logits,
        )
