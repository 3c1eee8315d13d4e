"""A decoder-only transformer with T5's layers, whose prefix can see itself in both directions.

Suffixes of array names: B batch, L length, E embed.
"""

from __future__ import annotations

import flax.linen as nn
import jax

from train.models.t5.attention import Attention, decoder_mask
from train.models.t5.config import DecoderOnlyConfig, T5Config
from train.models.t5.encoder_decoder import apply_output_layer
from train.models.t5.layers import (
    EMBED,
    Embed,
    Norm,
    RelativeBias,
    apply_mlp,
    dropout,
    lay_out,
    lay_out_residual,
)
from train.output_layer import DeferredLogits


class PrefixLayer(nn.Module):
    """One layer. `Attention` describes the modes."""

    config: T5Config
    deterministic: bool
    decode: bool = False
    prefill: bool = False

    @nn.compact
    def __call__(
        self,
        x_BLE: jax.Array,
        mask: jax.Array | None,
        bias: jax.Array,
        prefill_lengths: jax.Array | None,
    ) -> jax.Array:
        c, fixed = self.config, self.deterministic
        h_BLE = Norm(c.dtype, name='pre_self_attention_layer_norm')(x_BLE)
        h_BLE = lay_out(h_BLE, EMBED, self.decode)
        attend = Attention(c, fixed, self.decode, self.prefill, name='self_attention')
        h_BLE = attend(h_BLE, h_BLE, mask, bias, prefill_lengths)
        x_BLE = x_BLE + dropout(c, h_BLE, fixed, 'post_self_attention_dropout')
        x_BLE = lay_out_residual(x_BLE, self.decode)
        h_BLE = Norm(c.dtype, name='pre_mlp_layer_norm')(x_BLE)
        h_BLE = lay_out(h_BLE, EMBED, self.decode)
        h_BLE = apply_mlp(c, h_BLE, mask, fixed, self.decode or self.prefill)
        x_BLE = x_BLE + dropout(c, h_BLE, fixed, 'post_mlp_dropout')
        return lay_out_residual(x_BLE, self.decode)


class PrefixDecoder(nn.Module):
    """The embeddings, the layers and the logits."""

    config: DecoderOnlyConfig

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        mask: jax.Array | None,
        prefill_lengths: jax.Array | None,
        deterministic: bool,
        decode: bool,
        max_decode_length: int | None,
        prefill: bool,
    ) -> DeferredLogits:
        c = self.config.layer_config()
        length = (decode and max_decode_length) or tokens_BL.shape[1]
        bias = RelativeBias(c, bidirectional=False, cache=True, name='relpos_bias')(length, decode)
        embed = Embed(c, name='token_embedder')
        x_BLE = dropout(c, embed(tokens_BL), deterministic, 'input_dropout')
        for i in range(c.num_decoder_layers):
            layer = PrefixLayer(
                c.of_layer('decoder', i), deterministic, decode, prefill, name=f'layers_{i}'
            )
            x_BLE = layer(x_BLE, mask, bias, prefill_lengths)
        x_BLE = lay_out_residual(Norm(c.dtype, name='decoder_norm')(x_BLE), decode)
        x_BLE = dropout(c, x_BLE, deterministic, 'output_dropout')
        return apply_output_layer(c, embed, x_BLE)


class DecoderOnly(nn.Module):
    """A decoder-only transformer: maps tokens to the float32 logits of the next token.

    Parameters have T5X's paths and shapes, so its checkpoints fit.
    """

    config: DecoderOnlyConfig

    def setup(self) -> None:
        self.decoder = PrefixDecoder(self.config)

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
          decoder_input_tokens: the targets, shifted right, int32 [batch, length]. While decoding
            with a cache, the last token of each row, [batch, 1].
          decoder_target_tokens: the targets; 0 is padding. While decoding, only their shape counts.
          decoder_segment_ids: the segments of packed rows.
          decoder_positions: not used, because relative positions are counted within rows.
          decoder_causal_attention: 1 in the prefix, whose positions see each other in both
            directions.
          deterministic: whether there is no dropout.
          decode: whether keys and values are cached, in the collection 'cache'. The first call,
            without a cache, creates it, of the length of `decoder_input_tokens`.
          max_decode_length: the length of the cache. Needed in calls with a cache.
          prefill: whether this call fills the cache with `prefill_lengths` positions of each row.
            Later positions of the row are computed but not cached.
          prefill_lengths: int32 [batch].
          defer_logits: whether to return what computes the logits.

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
            prefill_lengths,
            deterministic,
            decode,
            max_decode_length,
            prefill,
        )
        return deferred if defer_logits else deferred.logits('replicate' if decode else None)
