"""Names for the dimensions of parameters without names, from their shapes and paths.

The width of a model is the size that most of its arrays share, so the dimension of that size is
'embed'. The other dimension of a matrix is 'mlp', 'heads' or 'vocab'; the paths say which. Under
the standard rules all three are sharded over the model axis, so a wrong guess is still a valid
layout. What such a pair of names cannot shard gets mesh axes instead.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from partitioning.plan.by_rules import Shape
from partitioning.rules import MeshLike, axis_sizes

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


Names = tuple[Any, ...]
_SMALLEST = 8  # smaller dimensions are not the width of a model
_USUAL_SHARDS = 8


@dataclasses.dataclass(frozen=True)
class Shards:
    """How many shards a dimension must allow.

    Attributes:
      data, model, total: the shards of a dimension that is sharded over the data axes, the model
        axis, and both.
      axes: the mesh axes that shard an array with only one dimension to shard.
    """

    data: int = _USUAL_SHARDS
    model: int = _USUAL_SHARDS
    total: int = _USUAL_SHARDS
    axes: tuple[str, ...] = ('data', 'model')

    @classmethod
    def of_mesh(cls, mesh: MeshLike) -> Shards:
        """The shards on a mesh with the axes of the standard rules."""
        sizes = axis_sizes(mesh)
        axes = tuple(axis for axis in sizes if axis in ('data', 'fsdp', 'model')) or tuple(sizes)
        total, model = math.prod(sizes[axis] for axis in axes), sizes.get('model', 1)
        return cls(total // model, model, total, axes)


class Named(NamedTuple):
    """The names of one array.

    Attributes:
      names: one per dimension: a logical axis, a tuple of mesh axes, or None.
      how: 'pair' if two dimensions have names, 'one' if one dimension has all mesh axes, 'part' if
        only some mesh axes shard the array, 'small' if it need not be sharded, and 'none' if it
        should be sharded but no dimension can be.
      undivided: the size of the dimension that could not be sharded as the path suggests, or None.
      use: what the path says; see `PathWords`.
    """

    names: Names
    how: Literal['pair', 'one', 'part', 'small', 'none']
    undivided: int | None = None
    use: str | None = None


class _Roles(NamedTuple):
    """Dimensions of an array by what they are; the model dimension may be missing."""

    embed: int
    model: int | None
    model_name: str
    kv: int | None = None


def replicated(shape: Shape, layers: int | None) -> Named:
    """The names of an array that need not be sharded."""
    return Named(tuple('layers' if d == layers else None for d in range(len(shape))), 'small')


class DimensionNames:
    """Names for all dimensions of all arrays, so that mesh axes shard each array.

    Args:
      shapes: the shape of each array, by path.
      stacked: the dimension that counts layers, for arrays that have one.
    """

    def __init__(self, shapes: Mapping[str, Shape], stacked: Mapping[str, int]):
        self._shapes, self._stacked = shapes, stacked
        self._shared: collections.Counter[int] = collections.Counter()
        for path in shapes:
            # A bias would count the output of its matrix twice.
            if read_path(path).use != 'bias':
                self._shared.update({shapes[path][d] for d in self._dims(path)})
        self._out_first = _out_first({path: self._matrix(path) for path in shapes})

    def _dims(self, path: str) -> list[int]:
        return [d for d in range(len(self._shapes[path])) if d != self._stacked.get(path)]

    def _matrix(self, path: str) -> Shape:
        return tuple(self._shapes[path][d] for d in self._dims(path))

    def named(self, path: str, shards: Shards) -> Named:
        """The names of one array; `shards` is what must divide sizes."""
        shape, words = self._shapes[path], read_path(path)
        dims = self._dims(path)
        if not dims:
            return replicated(shape, self._stacked.get(path))
        roles = self._roles(path, dims, words)

        def divides(dim: int | None, by: int) -> bool:
            return dim is not None and shape[dim] % by == 0 and shape[dim] > 0

        pair = {roles.embed: 'embed', roles.model: roles.model_name}
        if roles.kv is not None:
            pair[roles.kv] = 'kv'
        if divides(roles.embed, shards.data) and divides(roles.model, shards.model):
            return Named(self._names(path, pair), 'pair', use=words.use)
        undivided = None if roles.model is None else shape[roles.model]
        if not divides(roles.embed, shards.data):
            undivided = shape[roles.embed]
        others = sorted(dims, key=lambda dim: -shape[dim])
        for dim in (roles.embed, roles.model, *others):
            if divides(dim, shards.total):
                return Named(self._names(path, {dim: shards.axes}), 'one', undivided, words.use)
        part = {
            dim: pair[dim]
            for dim, by in ((roles.embed, shards.data), (roles.model, shards.model))
            if by > 1 and divides(dim, by)
        }
        names = self._names(path, part)
        return Named(names, 'part' if part else 'none', max(self._matrix(path)), words.use)

    def _names(self, path: str, names: Mapping[int | None, Any]) -> Names:
        layers = {} if (dim := self._stacked.get(path)) is None else {dim: 'layers'}
        return tuple((layers | {**names}).get(d) for d in range(len(self._shapes[path])))

    def _roles(self, path: str, dims: Sequence[int], words: PathWords) -> _Roles:
        shape = self._shapes[path]
        key = re.split('[/.]', path)[-1]
        out_first = self._out_first.get(key, key == 'weight')
        long = len(dims) > (2 if words.use == 'convolution' else 3)
        if long and words.use not in ('attention', 'bias'):  # a convolution of several channels
            one, other = dims[:2] if out_first else dims[-2:]
            return _Roles(*((other, one) if out_first else (one, other)), 'mlp')
        likely = [d for d in dims if shape[d] >= _SMALLEST] or dims
        most = max(self._shared[shape[d]] for d in likely)
        size = min(shape[d] for d in likely if self._shared[shape[d]] == most)
        same = [d for d in likely if shape[d] == size]
        # An inward matrix reads the width of the model, an outward one writes it.
        first = out_first == words.is_outward
        embed = same[0] if first and words.use not in ('table', 'positions') else same[-1]
        rest = [d for d in dims if d != embed]
        if words.use in ('positions', 'bias') or not rest:
            return _Roles(embed, None, '')
        if words.use == 'attention' and len(rest) > 1:
            return _Roles(embed, rest[-2], 'heads', rest[-1])
        name = {'attention': 'heads', 'table': 'vocab', 'logits': 'vocab'}.get(words.use or '')
        return _Roles(embed, max(rest, key=lambda d: shape[d]), name or 'mlp')


def _out_first(shapes: Mapping[str, Shape]) -> dict[str, bool]:
    """Whether arrays with a key have their output dimension first, as their biases show."""
    votes: collections.Counter[str] = collections.Counter()
    for path, shape in shapes.items():
        key = re.split('[/.]', path)[-1]
        module = path.removesuffix(key)
        bias = shapes.get(f'{module}bias') or shapes.get(f'{module}b')
        if bias is not None and len(bias) == 1 < len(shape) and shape[0] != shape[-1]:
            votes[key] += (shape[0] == bias[0]) - (shape[-1] == bias[0])
    return {key: vote > 0 for key, vote in votes.items() if vote}
