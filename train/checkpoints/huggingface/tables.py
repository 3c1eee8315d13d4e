"""Which of our arrays are which arrays of Hugging Face's models: one row for each kind of array.

The dimensions are written as `notation.py` describes: V vocabulary, D embed, H heads, K key and
value heads, N width of a head, F hidden layer, P positions; in T5 also E embed, J heads and their
width, M hidden layer, B buckets. `{layer}` is the name of a layer, and `{i}` its number.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple


class Row(NamedTuple):
    """One kind of array.

    Attributes:
      ours: our name below 'params/'.
      our_dimensions: its dimensions in one layer.
      theirs: the name in the files of a model.
      their_dimensions: the same dimensions in the order of these files.
    """

    ours: str
    our_dimensions: str
    theirs: str
    their_dimensions: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The arrays of an architecture.

    Attributes:
      rows: one for each kind of array. Of these, a model has those that its settings need.
      layer: our name of one layer, such as 'layer_{i}'.
      stacked: our name of all layers in one array, whose first dimension is the layer; None if they
        are never stacked.
      prefix: a part of names that some files leave out.
      ignored: regular expressions for names of files that are not weights, or copies.
      ignored_if_tied: the same, if the output layer is the embedding.
    """

    rows: tuple[Row, ...]
    layer: str
    stacked: str | None
    prefix: str = ''
    ignored: tuple[str, ...] = ()
    ignored_if_tied: tuple[str, ...] = (r'lm_head\.weight',)

    def ignores(self, name: str, *, is_tied: bool) -> bool:
        """Whether an array of a file is not a weight, or is a copy of another one.

        Args:
          name: its name in the file.
          is_tied: whether the output layer is the embedding.
        """
        patterns = self.ignored + (self.ignored_if_tied if is_tied else ())
        return any(re.fullmatch(pattern, name) for pattern in patterns)


def _rows(*lines: tuple[str, str, str, str]) -> tuple[Row, ...]:
    return tuple(Row(*line) for line in lines)


_ATTENTION = _rows(
    ('{layer}/attention/query', 'D H N', 'model.layers.{i}.self_attn.q_proj.weight', '(H N) D'),
    ('{layer}/attention/key', 'D K N', 'model.layers.{i}.self_attn.k_proj.weight', '(K N) D'),
    ('{layer}/attention/value', 'D K N', 'model.layers.{i}.self_attn.v_proj.weight', '(K N) D'),
    ('{layer}/attention/out', 'H N D', 'model.layers.{i}.self_attn.o_proj.weight', 'D (H N)'),
    ('{layer}/attention/query_bias', 'H N', 'model.layers.{i}.self_attn.q_proj.bias', '(H N)'),
    ('{layer}/attention/key_bias', 'K N', 'model.layers.{i}.self_attn.k_proj.bias', '(K N)'),
    ('{layer}/attention/value_bias', 'K N', 'model.layers.{i}.self_attn.v_proj.bias', '(K N)'),
    ('{layer}/attention/out_bias', 'D', 'model.layers.{i}.self_attn.o_proj.bias', 'D'),
    ('{layer}/attention/query_norm/scale', 'N', 'model.layers.{i}.self_attn.q_norm.weight', 'N'),
    ('{layer}/attention/key_norm/scale', 'N', 'model.layers.{i}.self_attn.k_norm.weight', 'N'),
)
_MLP = _rows(
    ('{layer}/mlp/gate', 'D F', 'model.layers.{i}.mlp.gate_proj.weight', 'F D'),
    ('{layer}/mlp/up', 'D F', 'model.layers.{i}.mlp.up_proj.weight', 'F D'),
    ('{layer}/mlp/down', 'F D', 'model.layers.{i}.mlp.down_proj.weight', 'D F'),
    ('{layer}/mlp/gate_bias', 'F', 'model.layers.{i}.mlp.gate_proj.bias', 'F'),
    ('{layer}/mlp/up_bias', 'F', 'model.layers.{i}.mlp.up_proj.bias', 'F'),
    ('{layer}/mlp/down_bias', 'D', 'model.layers.{i}.mlp.down_proj.bias', 'D'),
)
_AROUND = _rows(
    ('embedding', 'V D', 'model.embed_tokens.weight', 'V D'),
    ('output', 'D V', 'lm_head.weight', 'V D'),
    ('final_norm/scale', 'D', 'model.norm.weight', 'D'),
    ('{layer}/attention_norm/scale', 'D', 'model.layers.{i}.input_layernorm.weight', 'D'),
)
_NORMS = _rows(
    ('{layer}/mlp_norm/scale', 'D', 'model.layers.{i}.post_attention_layernorm.weight', 'D'),
)
_POST_NORMS = _rows(
    (
        '{layer}/attention_post_norm/scale',
        'D',
        'model.layers.{i}.post_attention_layernorm.weight',
        'D',
    ),
    ('{layer}/mlp_norm/scale', 'D', 'model.layers.{i}.pre_feedforward_layernorm.weight', 'D'),
    ('{layer}/mlp_post_norm/scale', 'D', 'model.layers.{i}.post_feedforward_layernorm.weight', 'D'),
)
# Frequencies of rotary positions, which old files contain.
_BUFFERS = (r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq',)

LLAMA = Table(
    rows=_AROUND + _ATTENTION + _MLP + _NORMS, layer='layer_{i}', stacked='layers', ignored=_BUFFERS
)
GEMMA_2 = Table(
    rows=_AROUND + _ATTENTION + _MLP + _POST_NORMS,
    layer='layer_{i}',
    stacked='layers',
    ignored=_BUFFERS,
)

# The matrices of GPT-2 are [inputs, outputs].
GPT2 = Table(
    rows=_rows(
        ('embedding', 'V D', 'transformer.wte.weight', 'V D'),
        ('position_embedding', 'P D', 'transformer.wpe.weight', 'P D'),
        ('output', 'D V', 'lm_head.weight', 'V D'),
        ('final_norm/scale', 'D', 'transformer.ln_f.weight', 'D'),
        ('final_norm/bias', 'D', 'transformer.ln_f.bias', 'D'),
        ('{layer}/attention_norm/scale', 'D', 'transformer.h.{i}.ln_1.weight', 'D'),
        ('{layer}/attention_norm/bias', 'D', 'transformer.h.{i}.ln_1.bias', 'D'),
        (
            '{layer}/attention/query',
            'D H N',
            'transformer.h.{i}.attn.c_attn.weight',
            'D (1of3 H N)',
        ),
        ('{layer}/attention/key', 'D H N', 'transformer.h.{i}.attn.c_attn.weight', 'D (2of3 H N)'),
        (
            '{layer}/attention/value',
            'D H N',
            'transformer.h.{i}.attn.c_attn.weight',
            'D (3of3 H N)',
        ),
        ('{layer}/attention/query_bias', 'H N', 'transformer.h.{i}.attn.c_attn.bias', '(1of3 H N)'),
        ('{layer}/attention/key_bias', 'H N', 'transformer.h.{i}.attn.c_attn.bias', '(2of3 H N)'),
        ('{layer}/attention/value_bias', 'H N', 'transformer.h.{i}.attn.c_attn.bias', '(3of3 H N)'),
        ('{layer}/attention/out', 'H N D', 'transformer.h.{i}.attn.c_proj.weight', '(H N) D'),
        ('{layer}/attention/out_bias', 'D', 'transformer.h.{i}.attn.c_proj.bias', 'D'),
        ('{layer}/mlp_norm/scale', 'D', 'transformer.h.{i}.ln_2.weight', 'D'),
        ('{layer}/mlp_norm/bias', 'D', 'transformer.h.{i}.ln_2.bias', 'D'),
        ('{layer}/mlp/up', 'D F', 'transformer.h.{i}.mlp.c_fc.weight', 'D F'),
        ('{layer}/mlp/up_bias', 'F', 'transformer.h.{i}.mlp.c_fc.bias', 'F'),
        ('{layer}/mlp/down', 'F D', 'transformer.h.{i}.mlp.c_proj.weight', 'F D'),
        ('{layer}/mlp/down_bias', 'D', 'transformer.h.{i}.mlp.c_proj.bias', 'D'),
    ),
    layer='layer_{i}',
    stacked='layers',
    prefix='transformer.',
    ignored=(r'(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)',),  # masks, in old files
)


def _t5_attention(ours: str, theirs: str) -> tuple[Row, ...]:
    return _rows(
        (f'{ours}/query/kernel', 'E J', f'{theirs}.q.weight', 'J E'),
        (f'{ours}/key/kernel', 'E J', f'{theirs}.k.weight', 'J E'),
        (f'{ours}/value/kernel', 'E J', f'{theirs}.v.weight', 'J E'),
        (f'{ours}/out/kernel', 'J E', f'{theirs}.o.weight', 'E J'),
    )


def _t5_mlp(ours: str, theirs: str) -> tuple[Row, ...]:
    return _rows(
        (f'{ours}/pre_mlp_layer_norm/scale', 'E', f'{theirs}.layer_norm.weight', 'E'),
        (f'{ours}/mlp/wi/kernel', 'E M', f'{theirs}.DenseReluDense.wi.weight', 'M E'),
        (f'{ours}/mlp/wi_0/kernel', 'E M', f'{theirs}.DenseReluDense.wi_0.weight', 'M E'),
        (f'{ours}/mlp/wi_1/kernel', 'E M', f'{theirs}.DenseReluDense.wi_1.weight', 'M E'),
        (f'{ours}/mlp/wo/kernel', 'M E', f'{theirs}.DenseReluDense.wo.weight', 'E M'),
    )


_ENCODER, _DECODER = (
    ('encoder/{layer}', 'encoder.block.{i}'),
    ('decoder/{layer}', 'decoder.block.{i}'),
)
_BIAS = 'block.0.layer.0.SelfAttention.relative_attention_bias.weight'
T5 = Table(
    rows=(
        *_rows(
            ('token_embedder/embedding', 'V E', 'shared.weight', 'V E'),
            ('encoder/relpos_bias/rel_embedding', 'H B', f'encoder.{_BIAS}', 'B H'),
            ('decoder/relpos_bias/rel_embedding', 'H B', f'decoder.{_BIAS}', 'B H'),
            ('encoder/encoder_norm/scale', 'E', 'encoder.final_layer_norm.weight', 'E'),
            ('decoder/decoder_norm/scale', 'E', 'decoder.final_layer_norm.weight', 'E'),
            ('decoder/logits_dense/kernel', 'E V', 'lm_head.weight', 'V E'),
            (
                f'{_ENCODER[0]}/pre_attention_layer_norm/scale',
                'E',
                f'{_ENCODER[1]}.layer.0.layer_norm.weight',
                'E',
            ),
            (
                f'{_DECODER[0]}/pre_self_attention_layer_norm/scale',
                'E',
                f'{_DECODER[1]}.layer.0.layer_norm.weight',
                'E',
            ),
            (
                f'{_DECODER[0]}/pre_cross_attention_layer_norm/scale',
                'E',
                f'{_DECODER[1]}.layer.1.layer_norm.weight',
                'E',
            ),
        ),
        *_t5_attention(f'{_ENCODER[0]}/attention', f'{_ENCODER[1]}.layer.0.SelfAttention'),
        *_t5_mlp(_ENCODER[0], f'{_ENCODER[1]}.layer.1'),
        *_t5_attention(f'{_DECODER[0]}/self_attention', f'{_DECODER[1]}.layer.0.SelfAttention'),
        *_t5_attention(
            f'{_DECODER[0]}/encoder_decoder_attention', f'{_DECODER[1]}.layer.1.EncDecAttention'
        ),
        *_t5_mlp(_DECODER[0], f'{_DECODER[1]}.layer.2'),
    ),
    layer='layers_{i}',
    stacked=None,
    # Copies of the embedding, and biases that no release of transformers uses.
    ignored=(
        r'(encoder|decoder)\.embed_tokens\.weight',
        r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight',
    ),
)
