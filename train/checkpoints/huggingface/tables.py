"""Which of our arrays are which arrays of Hugging Face's models: one row for each kind of array.

The dimensions are written as `notation.py` describes: V vocabulary, D embed, H heads, K key and
value heads, N width of a head, F hidden layer, P positions; in T5 also E embed, J heads and their
width, M hidden layer, B buckets. `{layer}` is the name of a layer, and `{i}` its number.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from train.checkpoints.huggingface.notation import letters_of


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
        """Whether an array is not a weight, or a copy, as the output layer is if `is_tied`."""
        patterns = self.ignored + (self.ignored_if_tied if is_tied else ())
        return any(re.fullmatch(pattern, name) for pattern in patterns)


def _rows(ours: str, theirs: str, *lines: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows whose names begin with `ours` and `theirs`.

    A line has the elements of a `Row`. If it ends with the dimensions of a bias, it stands for two
    rows, and `.weight` and `.bias` are added to the name in the files.
    """
    rows = list[Row]()
    for our_name, our_dimensions, their_name, their_dimensions, *bias in lines:
        weight = f'{their_name}.weight' if bias else their_name
        rows.append(Row(ours + our_name, our_dimensions, theirs + weight, their_dimensions))
        for dimensions in bias:
            letters = ' '.join(letters_of(dimensions))
            rows.append(
                Row(f'{ours}{our_name}_bias', letters, f'{theirs}{their_name}.bias', dimensions)
            )
    return tuple(rows)


_BLOCKS = (
    *_rows(
        '{layer}/attention/',
        'model.layers.{i}.self_attn.',
        ('query', 'D H N', 'q_proj', '(H N) D', '(H N)'),
        ('key', 'D K N', 'k_proj', '(K N) D', '(K N)'),
        ('value', 'D K N', 'v_proj', '(K N) D', '(K N)'),
        ('out', 'H N D', 'o_proj', 'D (H N)', 'D'),
        ('query_norm/scale', 'N', 'q_norm.weight', 'N'),
        ('key_norm/scale', 'N', 'k_norm.weight', 'N'),
    ),
    *_rows(
        '{layer}/mlp/',
        'model.layers.{i}.mlp.',
        ('gate', 'D F', 'gate_proj', 'F D', 'F'),
        ('up', 'D F', 'up_proj', 'F D', 'F'),
        ('down', 'F D', 'down_proj', 'D F', 'D'),
    ),
    *_rows(
        '',
        '',
        ('embedding', 'V D', 'model.embed_tokens.weight', 'V D'),
        ('output', 'D V', 'lm_head.weight', 'V D'),
        ('final_norm/scale', 'D', 'model.norm.weight', 'D'),
        ('{layer}/attention_norm/scale', 'D', 'model.layers.{i}.input_layernorm.weight', 'D'),
    ),
)
_NORMS = _rows(
    '{layer}/',
    'model.layers.{i}.',
    ('mlp_norm/scale', 'D', 'post_attention_layernorm.weight', 'D'),
)
_POST_NORMS = _rows(
    '{layer}/',
    'model.layers.{i}.',
    ('attention_post_norm/scale', 'D', 'post_attention_layernorm.weight', 'D'),
    ('mlp_norm/scale', 'D', 'pre_feedforward_layernorm.weight', 'D'),
    ('mlp_post_norm/scale', 'D', 'post_feedforward_layernorm.weight', 'D'),
)
# Frequencies of rotary positions, which old files contain.
_BUFFERS = (r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq',)
LLAMA = Table(rows=_BLOCKS + _NORMS, layer='layer_{i}', stacked='layers', ignored=_BUFFERS)
GEMMA_2 = dataclasses.replace(LLAMA, rows=_BLOCKS + _POST_NORMS)

# The matrices of GPT-2 are [inputs, outputs].
GPT2 = Table(
    rows=(
        *_rows(
            '',
            'transformer.',
            ('embedding', 'V D', 'wte.weight', 'V D'),
            ('position_embedding', 'P D', 'wpe.weight', 'P D'),
            ('final_norm/scale', 'D', 'ln_f.weight', 'D'),
            ('final_norm/bias', 'D', 'ln_f.bias', 'D'),
        ),
        *_rows('', '', ('output', 'D V', 'lm_head.weight', 'V D')),
        *_rows(
            '{layer}/',
            'transformer.h.{i}.',
            ('attention_norm/scale', 'D', 'ln_1.weight', 'D'),
            ('attention_norm/bias', 'D', 'ln_1.bias', 'D'),
            ('attention/query', 'D H N', 'attn.c_attn', 'D (1of3 H N)', '(1of3 H N)'),
            ('attention/key', 'D H N', 'attn.c_attn', 'D (2of3 H N)', '(2of3 H N)'),
            ('attention/value', 'D H N', 'attn.c_attn', 'D (3of3 H N)', '(3of3 H N)'),
            ('attention/out', 'H N D', 'attn.c_proj', '(H N) D', 'D'),
            ('mlp_norm/scale', 'D', 'ln_2.weight', 'D'),
            ('mlp_norm/bias', 'D', 'ln_2.bias', 'D'),
            ('mlp/up', 'D F', 'mlp.c_fc', 'D F', 'F'),
            ('mlp/down', 'F D', 'mlp.c_proj', 'F D', 'D'),
        ),
    ),
    layer='layer_{i}',
    stacked='layers',
    prefix='transformer.',
    ignored=(r'(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)',),  # masks, in old files
)


def _t5_attention(ours: str, theirs: str, norm: str) -> tuple[Row, ...]:
    """The rows of an attention layer, and of the norm before it, whose name here is `norm`."""
    sublayer = theirs.rpartition('.')[0]
    return (
        *_rows(
            f'{ours}/',
            f'{theirs}.',
            ('query/kernel', 'E J', 'q.weight', 'J E'),
            ('key/kernel', 'E J', 'k.weight', 'J E'),
            ('value/kernel', 'E J', 'v.weight', 'J E'),
            ('out/kernel', 'J E', 'o.weight', 'E J'),
        ),
        Row(norm, 'E', f'{sublayer}.layer_norm.weight', 'E'),
    )


def _t5_mlp(ours: str, theirs: str) -> tuple[Row, ...]:
    return _rows(
        f'{ours}/',
        f'{theirs}.',
        ('pre_mlp_layer_norm/scale', 'E', 'layer_norm.weight', 'E'),
        ('mlp/wi/kernel', 'E M', 'DenseReluDense.wi.weight', 'M E'),
        ('mlp/wi_0/kernel', 'E M', 'DenseReluDense.wi_0.weight', 'M E'),
        ('mlp/wi_1/kernel', 'E M', 'DenseReluDense.wi_1.weight', 'M E'),
        ('mlp/wo/kernel', 'M E', 'DenseReluDense.wo.weight', 'E M'),
    )


_BIAS = 'block.0.layer.0.SelfAttention.relative_attention_bias.weight'
T5 = Table(
    rows=(
        *_rows(
            '',
            '',
            ('token_embedder/embedding', 'V E', 'shared.weight', 'V E'),
            ('encoder/relpos_bias/rel_embedding', 'H B', f'encoder.{_BIAS}', 'B H'),
            ('decoder/relpos_bias/rel_embedding', 'H B', f'decoder.{_BIAS}', 'B H'),
            ('encoder/encoder_norm/scale', 'E', 'encoder.final_layer_norm.weight', 'E'),
            ('decoder/decoder_norm/scale', 'E', 'decoder.final_layer_norm.weight', 'E'),
            ('decoder/logits_dense/kernel', 'E V', 'lm_head.weight', 'V E'),
        ),
        *_t5_attention(
            'encoder/{layer}/attention',
            'encoder.block.{i}.layer.0.SelfAttention',
            'encoder/{layer}/pre_attention_layer_norm/scale',
        ),
        *_t5_mlp('encoder/{layer}', 'encoder.block.{i}.layer.1'),
        *_t5_attention(
            'decoder/{layer}/self_attention',
            'decoder.block.{i}.layer.0.SelfAttention',
            'decoder/{layer}/pre_self_attention_layer_norm/scale',
        ),
        *_t5_attention(
            'decoder/{layer}/encoder_decoder_attention',
            'decoder.block.{i}.layer.1.EncDecAttention',
            'decoder/{layer}/pre_cross_attention_layer_norm/scale',
        ),
        *_t5_mlp('decoder/{layer}', 'decoder.block.{i}.layer.2'),
    ),
    layer='layers_{i}',
    stacked=None,
    # Copies of the embedding, and biases that no release of transformers uses.
    ignored=(
        r'(encoder|decoder)\.embed_tokens\.weight',
        r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight',
    ),
)
