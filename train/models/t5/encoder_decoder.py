"""T5 and its variants: an encoder-decoder.

Suffixes of array names: B batch, L length, S length of the encoder, E embed, V vocab.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.remat import named
from train.models.residual import residual_names
from train.models.t5.attention import Attention, decoder_mask, pair_mask, segment_mask
from train.models.t5.config import T5Config
from train.models.t5.layers import (
    EMBED,
    Dense,
    Embed,
    Norm,
    RelativeBias,
    apply_mlp,
    dropout,
    lay_out,
    lay_out_residual,
)
from train.models.t5.stack import run_layers
from train.output_layer import DeferredLogits


class Layer(nn.Module):
    """One layer of the encoder, or of the decoder if it attends to an encoder too.

    Attributes:
      config: sizes and choices.
      deterministic: whether there is no dropout.
      decode: whether keys and values are cached, for one new position per call.
      max_decode_length: the length of the cache while decoding.
    """

    config: T5Config
    deterministic: bool
    decode: bool = False
    max_decode_length: int | None = None

    @nn.compact
    def __call__(
        self,
        x_BLE: jax.Array,
        mask: jax.Array | None,
        bias: jax.Array | None,
        encoded_BSE: jax.Array | None = None,
        cross_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        c = self.config
        if bias is None:
            length = (self.decode and self.max_decode_length) or x_BLE.shape[1]
            bias = RelativeBias(c, bidirectional=encoded_BSE is None, name='relpos_bias')(length)
        x_BLE = named(x_BLE, 'residual')
        before, name = 'pre_attention', 'attention'
        if encoded_BSE is not None:
            before, name = 'pre_self_attention', 'self_attention'
        h_BLE = self._norm(x_BLE, before)
        attend = Attention(c, self.deterministic, self.decode, name=name)
        x_BLE = self._add(x_BLE, attend(h_BLE, h_BLE, mask, bias))
        if encoded_BSE is not None:
            h_BLE = self._norm(x_BLE, 'pre_cross_attention')
            attend = Attention(c, self.deterministic, name='encoder_decoder_attention')
            x_BLE = self._add(x_BLE, attend(h_BLE, encoded_BSE, cross_mask))
        h_BLE = self._norm(x_BLE, 'pre_mlp')
        h_BLE = apply_mlp(c, h_BLE, mask, self.deterministic, self.decode)
        return self._add(x_BLE, h_BLE), None

    def _norm(self, x_BLE: jax.Array, before: str) -> jax.Array:
        h_BLE = Norm(self.config.dtype, name=f'{before}_layer_norm')(x_BLE)
        return lay_out(h_BLE, EMBED, self.decode)

    def _add(self, x_BLE: jax.Array, branch_BLE: jax.Array) -> jax.Array:
        branch_BLE = dropout(self.config, branch_BLE, self.deterministic, None)
        return lay_out_residual(x_BLE + branch_BLE, self.decode)


class Encoder(nn.Module):
    """The encoder's layers, between the embeddings and the final norm."""

    config: T5Config
    embed: Embed

    @nn.compact
    def __call__(self, tokens_BL: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        x_BLE = dropout(c, self.embed(tokens_BL), deterministic, None)
        bias = None
        if not c.scalable:
            bias = RelativeBias(c, bidirectional=True, name='relpos_bias')(tokens_BL.shape[1])
        layer = {'deterministic': deterministic}
        x_BLE = run_layers(Layer, c, c.num_encoder_layers, 'encoder', layer, x_BLE, mask, bias)
        x_BLE = lay_out(Norm(c.dtype, name='encoder_norm')(x_BLE), EMBED)
        return nn.Dropout(c.dropout_rate)(x_BLE, deterministic)


class Decoder(nn.Module):
    """The decoder's layers, between the embeddings and the logits."""

    config: T5Config
    embed: Embed

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        encoded_BSE: jax.Array,
        mask: jax.Array | None,
        cross_mask: jax.Array,
        deterministic: bool,
        decode: bool,
        max_decode_length: int | None,
    ) -> DeferredLogits:
        c = self.config
        x_BLE = dropout(c, self.embed(tokens_BL), deterministic, None)
        bias = None
        if not c.scalable:
            length = (decode and max_decode_length) or tokens_BL.shape[1]
            bias = RelativeBias(c, bidirectional=False, name='relpos_bias')(length)
        layer: dict[str, Any] = {'deterministic': deterministic, 'decode': decode}
        layer |= {'max_decode_length': max_decode_length}
        arguments = (x_BLE, mask, bias, encoded_BSE, cross_mask)
        x_BLE = run_layers(Layer, c, c.num_decoder_layers, 'decoder', layer, *arguments)
        x_BLE = lay_out_residual(Norm(c.dtype, name='decoder_norm')(x_BLE), decode)
        x_BLE = dropout(c, x_BLE, deterministic, None)
        return apply_output_layer(c, self.embed, x_BLE)


def apply_output_layer(config: T5Config, embed: Embed, x_BLE: jax.Array) -> DeferredLogits:
    """Returns what computes the float32 logits, in a compact method of a decoder."""
    if config.logits_via_embedding:
        output_EV, divisor = embed.embedding.T, math.sqrt(config.emb_dim)
    else:
        shape, names = (config.emb_dim, config.vocab_size), ('embed', 'vocab')
        dense = Dense(shape, 1, names, jnp.float32, name='logits_dense')
        output_EV, divisor = dense.get_kernel(), 1.0
    return DeferredLogits(
        x_BLD=x_BLE, w_DV=output_EV, dtype=jnp.float32, names=residual_names(), divisor=divisor
    )


class T5(nn.Module):
    """An encoder-decoder: maps inputs and targets to the float32 logits of the targets.

    Parameters have T5X's paths and shapes, so its checkpoints fit. Positions in packed rows are
    taken and not used, because relative positions are counted within rows.
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
        """Computes the logits, given the encoded inputs.

        Args:
          encoded: what `encode` returned.
          encoder_input_tokens: the inputs, for their padding.
          decoder_input_tokens: the targets, shifted right. While decoding with a cache, the last
            token of each row, [batch, 1].
          decoder_target_tokens: the targets; 0 is padding. While decoding, only their shape counts.
          encoder_segment_ids: the segments of packed inputs.
          decoder_segment_ids: the segments of packed targets.
          decoder_positions: not used.
          deterministic: whether there is no dropout.
          decode: whether keys and values are cached, in the collection 'cache'. The first call,
            without a cache, creates it, of the length of `decoder_input_tokens`.
          max_decode_length: the length of the cache. Needed in calls with a cache.
          defer_logits: whether to return what computes the logits.

        Returns:
          float32 [batch, length, vocab_size], or what computes it.
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
            encoded,
            mask,
            cross_mask,
            deterministic,
            decode,
            max_decode_length,
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
