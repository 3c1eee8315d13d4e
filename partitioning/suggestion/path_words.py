"""What the words of a path say about a parameter: what it is for, and which way it points."""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

Use = Literal['table', 'positions', 'logits', 'attention', 'convolution', 'mlp', 'bias']

# The last key of a path is the module itself unless it is one of these.
ARRAY_KEYS = {'kernel', 'w', 'weight', 'weights', 'embedding', 'embeddings', 'bias', 'b', 'scale'}
_ATTENTION = re.compile(r'att(n|ention)')
_PROJECTION = re.compile(
    r'^(w_?)?(q|k|v|kv|qkv|query|key|value|query_key_value)$|^o$|(^|_)(q|k|v|o|kv|qkv)_(proj|einsum)$'
)
_POSITIONS = re.compile(r'(^|_)pos(_|$|it|emb)|^wpe$')
_TABLE = re.compile(r'embed|(^|_)emb(_|$)|^(wte|vocab|shared|token_types?)$')
_LOGITS = re.compile(
    r'^((lm|mlm|output|cls|classification)_)?head(_\d+)?$|logit|classifier|unembed'
)
_MLP = re.compile(r'mlp|ffn?|fc|feed|dense|linear|proj|gat(e|ing)|up|down|^w[io]?_?\d*$|layer')
_OUTWARD = re.compile(r'(^|_)(o|out|wo|down|output|fc2|attn_vec|dense_1|linear_1)(_|$)|^(c_)?proj$')


class PathWords(NamedTuple):
    """What a path says.

    Attributes:
      use: what the array is for; None if no word is known.
      is_outward: whether its module returns from attention or from an MLP to the model's width.
    """

    use: Use | None
    is_outward: bool


@functools.lru_cache(maxsize=4096)
def read_path(path: str) -> PathWords:
    """Reads the words of a path such as 'h/0/attn/c_proj/kernel'."""
    keys = [_snake_case(key) for key in re.split('[/.]', path) if re.search('[a-zA-Z]', key)] or [
        ''
    ]
    last = keys.pop() if len(keys) > 1 and keys[-1] in ARRAY_KEYS else ''
    module, parent = keys[-1], keys[-2] if len(keys) > 1 else ''
    is_attention = _PROJECTION.search(module) or any(map(_ATTENTION.search, keys))
    outward = _OUTWARD.search(module) or parent == 'output'
    if last != 'kernel' and (_POSITIONS.search(module) or _POSITIONS.search(parent)):
        return PathWords('positions', False)
    if last in ('bias', 'b') or 'bias' in module:
        return PathWords('bias', False)
    if _LOGITS.search(module):
        return PathWords('logits', False)
    if last.startswith('embedding') or (last != 'kernel' and _TABLE.search(module)):
        return PathWords('table', False)
    if is_attention:
        return PathWords('attention', bool(outward) or module in ('dense', 'linear'))
    if 'conv' in module:
        return PathWords('convolution', False)
    known = any(map(_MLP.search, keys))
    return PathWords('mlp' if known else None, bool(outward))


def _snake_case(key: str) -> str:
    """A key in lower case with underscores: self_attention for SelfAttention."""
    return re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', key).lower()
