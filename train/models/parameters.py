"""The parameters of the built-in transformer: paths, shapes, logical axes and initial values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from train.models.config import TransformerConfig

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The logical axes and the shape of an array, and the standard deviation of its initial values.

    If `std` is 0, all initial values are `constant`.
    """

    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    std: float = 0.0
    constant: float = 0.0

    def create(self, key: jax.Array, dtype: str) -> jax.Array:
        """Returns the initial values: constant, or drawn from a truncated normal distribution."""
        if not self.std:
            return jnp.full(self.shape, self.constant, dtype)
        # One layer at a time, with heads and kv as one dimension: XLA compiles that faster.
        sizes = list[int]()
        for name, size in zip(self.names, self.shape, strict=True):
            sizes[-1:] = [sizes[-1] * size] if name == 'kv' else [*sizes[-1:], size]

        def draw(key: jax.Array, shape: list[int]) -> jax.Array:
            normal = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
            return (normal * (self.std / 0.87962566)).astype(dtype)  # the std of `normal`

        if self.names[0] != 'layers':
            return draw(key, sizes).reshape(self.shape)
        keys = jax.random.split(key, sizes[0])
        return jax.lax.map(lambda key: draw(key, sizes[1:]), keys).reshape(self.shape)


def list_parameters(config: TransformerConfig) -> Params:
    """Returns each `Parameter` of a model, in nested dicts."""
    c = config
    d, std = c.embed_dim, c.embed_dim**-0.5
    table = {'embedding': Parameter(('vocab', 'embed'), (c.vocab_size, d), std)}
    if c.positions == 'learned':
        table['position_embedding'] = Parameter((None, 'embed'), (c.max_positions, d), std)
    if not c.tie_embeddings:
        table['output'] = Parameter(('embed', 'vocab'), (d, c.vocab_size), std)
    table |= _norm(c, 'final_norm')
    for path, p in _layer(c).items():
        if c.scan_layers:
            names, shape = ('layers', *p.names), (c.num_layers, *p.shape)
            table[f'layers/{path}'] = dataclasses.replace(p, names=names, shape=shape)
        else:
            table |= {f'layer_{i}/{path}': p for i in range(c.num_layers)}
    return unflatten_dict(table, sep='/')


def _layer(c: TransformerConfig) -> dict[str, Parameter]:
    """The parameters of one layer by path."""
    kv_heads = c.kv_heads_axis
    size = {'embed': c.embed_dim, 'heads': c.num_heads, kv_heads: c.num_kv_heads}
    size |= {'kv': c.head_dim, 'mlp': c.mlp_dim}
    # A matrix's logical axes, how many of them are inputs, and its group in `biases`.
    matrices = {
        'attention/query': (('embed', 'heads', 'kv'), 1, 'qkv'),
        'attention/key': (('embed', kv_heads, 'kv'), 1, 'qkv'),
        'attention/value': (('embed', kv_heads, 'kv'), 1, 'qkv'),
        'attention/out': (('heads', 'kv', 'embed'), 2, 'out'),
        'mlp/gate': (('embed', 'mlp'), 1, 'mlp'),
        'mlp/up': (('embed', 'mlp'), 1, 'mlp'),
        'mlp/down': (('mlp', 'embed'), 1, 'mlp'),
    }
    if not c.gated_mlp:
        del matrices['mlp/gate']
    table = {}
    if c.experts is not None:
        count, width = c.experts.num_experts, c.embed_dim
        table['mlp/router'] = Parameter(('embed', None), (width, count), width**-0.5)
    for path, (names, num_in, bias) in matrices.items():
        shape = tuple(size[name] for name in names)
        std = math.prod(shape[:num_in]) ** -0.5
        if names[-1] == 'embed':
            # Each layer adds two branches. This keeps the sum of all at the scale of embeddings.
            std *= (2 * c.num_layers) ** -0.5
        if path.startswith('mlp/') and c.experts is not None:
            names = ('expert', *('expert_mlp' if name == 'mlp' else name for name in names))
            shape = (count, *shape)
        table[path] = Parameter(names, shape, std)
        if bias in c.biases:
            table[f'{path}_bias'] = Parameter(names[num_in:], shape[num_in:])
    table |= _norm(c, 'attention_norm') | _norm(c, 'mlp_norm')
    if c.post_norms:
        table |= _norm(c, 'attention_post_norm') | _norm(c, 'mlp_post_norm')
    if c.qk_norm:
        table |= _norm(c, 'attention/query_norm', 'kv') | _norm(c, 'attention/key_norm', 'kv')
    return table


def _norm(c: TransformerConfig, path: str, name: str = 'embed') -> dict[str, Parameter]:
    shape = (c.embed_dim if name == 'embed' else c.head_dim,)
    scale = Parameter((name,), shape, constant=0.0 if c.norm_scale_offset else 1.0)
    bias = {f'{path}/bias': Parameter((name,), shape)} if 'norm' in c.biases else {}
    return {f'{path}/scale': scale, **bias}
