"""Guesses from the words of a path what an array is for, and which side is the model's width.

Words are hints. Where sizes and the neighbours of an array say something else, they decide; see
`structure`.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

Use = Literal['table', 'positions', 'logits', 'attention', 'convolution', 'mlp', 'bias']
Side = Literal['inward', 'outward']

# The last key of a path is the module itself unless it is one of these.
ARRAY_KEYS = {'kernel', 'w', 'weight', 'weights', 'embedding', 'embeddings', 'bias', 'b', 'scale'}
_ATTENTION = re.compile(r'att(n|ention)(?!_?blocks)')  # whose blocks have an MLP, too
_MLP_BLOCK = re.compile(r'(^|_)(mlp|ffn?|feed_?forward)(_|$)')
_PROJECTION = re.compile(
    r'^(w_?)?(q|k|v|kv|qkv|query|key|value|query_key_value)$|^o$|(^|_)(q|k|v|o|kv|qkv)_(proj|einsum)$'
)
_POSITIONS = re.compile(r'(^|_)pos(_|$|it|emb)|^wpe$')
_TABLE = re.compile(r'embed|(^|_)emb(_|$)|^(wte|vocab|shared|token_types?)$')
_NOT_A_TABLE = re.compile(r'patch|(^|_)(conv|linear|dense|proj)(_|$)')
_LOGITS = re.compile(
    r'^((lm|mlm|output|cls|classification)_)?head(_\d+)?$|logit|classifier|unembed'
)
_MLP = re.compile(r'mlp|ffn?|fc|feed|dense|linear|proj|gat(e|ing)|up|down|^w[io]?_?\d*$|layer')
_OUTWARD = re.compile(r'(^|_)(o|out|wo|down|output|fc2|attn_vec|4h_to_h)(_|$)|^(c_)?proj$')
_INWARD = re.compile(
    r'(^|_)(in|wi|up|gate|gating|fc1|c_fc|c_attn|h_to_4h|intermediate|router)(_|$)'
    r'|(^|_)(q|k|v|kv|qkv|query|key|value)(_|$)'
)
_NORM = re.compile(r'norm|(^|_)(ln|rms)(_|$|\d)')
_NOT_OF_THE_WIDTH = re.compile(r'batch|group|(^|_)(bn|gn|q|k)(_|$)')  # of channels, or of a head
_NORM_SCALE = {'scale', 'weight', 'w', 'gamma', 'g', 'kernel'}
_ROUTER = re.compile(r'router|^(expert_)?gate$|^gating$')
_INPUT = re.compile(r'patch|stem|(^|_)x_embed|(^|_)(input|image|pixel)s?_(embed|proj)')
_EXPERTS = re.compile(r'expert|moe')


class PathWords(NamedTuple):
    """What a path says.

    Attributes:
      use: what the array is for; None if no word is known.
      side: 'inward' if its module reads the width of the model, 'outward' if it writes it, as the
        projections into and out of attention, an MLP or a mixer do; None if no word says so.
      is_norm: whether it scales what has the width of the model, as norms do.
      is_router: whether its module chooses experts.
      in_experts: whether the array belongs to experts.
      is_input: whether its module reads the input of the model, such as patches of images.
    """

    use: Use | None
    side: Side | None
    is_norm: bool = False
    is_router: bool = False
    in_experts: bool = False
    is_input: bool = False


@functools.lru_cache(maxsize=4096)
def read_path(path: str) -> PathWords:
    """Reads the words of a path such as 'h/0/attn/c_proj/kernel'."""
    keys = [_snake_case(key) for key in re.split('[/.]', path) if re.search('[a-zA-Z]', key)] or [
        ''
    ]
    last = keys.pop() if len(keys) > 1 and keys[-1] in ARRAY_KEYS else ''
    module, parent = keys[-1], keys[-2] if len(keys) > 1 else ''
    use = _use(keys, last)
    side: Side | None = None
    if _OUTWARD.search(module) or parent == 'output':
        side = 'outward'
    elif use == 'attention' and module in ('dense', 'linear'):
        side = 'outward'  # the only other matrix of attention in these libraries
    elif _INWARD.search(module):
        side = 'inward'
    return PathWords(
        use,
        None if use in ('table', 'positions', 'bias') else side,
        is_norm=_is_norm_scale(keys, last),
        is_router=bool(_ROUTER.search(module)),
        in_experts=use != 'attention' and any(map(_EXPERTS.search, keys)),
        is_input=any(map(_INPUT.search, keys)),
    )


def _is_norm_scale(keys: list[str], last: str) -> bool:
    module, key = (keys[-1], last) if last else ((keys[-2] if len(keys) > 1 else ''), keys[-1])
    is_norm = _NORM.search(module) and not _NOT_OF_THE_WIDTH.search(module)
    return bool(is_norm) and key in _NORM_SCALE


def _use(keys: list[str], last: str) -> Use | None:
    module, parent = keys[-1], keys[-2] if len(keys) > 1 else ''
    blocks = (key for key in reversed(keys) if _ATTENTION.search(key) or _MLP_BLOCK.search(key))
    is_attention = _PROJECTION.search(module) or _ATTENTION.search(next(blocks, ''))
    if last != 'kernel' and (_POSITIONS.search(module) or _POSITIONS.search(parent)):
        return 'positions'
    if last in ('bias', 'b') or 'bias' in module:
        return 'bias'
    if _LOGITS.search(module):
        return 'logits'
    is_table = last != 'kernel' and _TABLE.search(module) and not _NOT_A_TABLE.search(module)
    if last.startswith('embedding') or is_table:
        return 'table'
    if is_attention:
        return 'attention'
    if 'conv' in module:
        return 'convolution'
    return 'mlp' if any(map(_MLP.search, keys)) else None


def _snake_case(key: str) -> str:
    """A key in lower case with underscores: self_attention for SelfAttention."""
    return re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', key).lower()
