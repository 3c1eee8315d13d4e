"""Faults of operations in layers and on gradients, which need a sharded dimension whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.blame_programs.faults.fault import (
    ATTENTION,
    FILES,
    LAYERS,
    STEPS,
    Fault,
    edit,
    rewritten,
)


class _Line(NamedTuple):
    """A line of a program, and the part of it that faults write in another way."""

    program: str
    text: str
    part: str
    file: str = ''


_HIDDEN = "        hidden_BLF = constrain(jax.nn.gelu(x_BLD @ up), ('batch', 'length', 'mlp'))\n"
_PLAIN_HIDDEN = "    hidden = lay_out(jax.nn.relu(x @ w['up']), P('data', None, 'model'))\n"
_EARLY = "        hidden_BLF = jax.nn.gelu(constrain(x_BLD, ('batch', 'length', 'mlp')) @ up)\n"
_PLAIN_EARLY = "    hidden = jax.nn.relu(lay_out(x, P('data', None, 'model')) @ w['up'])\n"

Table = tuple[tuple[str, _Line, dict[str, str]], ...]

_SET_3: Table = (
    (
        'operation in a layer',
        _Line('linen_trainer', _HIDDEN, 'x_BLD @ up'),
        {
            'flip of the hidden layer': '(x_BLD @ up)[..., ::-1]',
            'sort of the hidden layer': 'jnp.sort(x_BLD @ up)',
            'cumsum over rows': 'jnp.cumsum(x_BLD, axis=0) @ up',
        },
    ),
    (
        'operation in a layer',
        _Line('linen_trainer', '        weights = jax.nn.softmax(scores)\n', 'scores)'),
        {'roll over heads': 'jnp.roll(scores, 1, axis=1))'},
    ),
    (
        'operation in a layer',
        _Line('plain_trainer', _PLAIN_HIDDEN, "x @ w['up']"),
        {
            'roll over rows': "jnp.roll(x, 1, axis=0) @ w['up']",
            'flip of the hidden layer': "jnp.flip(x @ w['up'], -1)",
            'cumulative maximum': "jax.lax.cummax(x @ w['up'], axis=2)",
            'flattened': "jnp.roll((x @ w['up']).reshape(x.shape[0], -1), 1, -1)"
            '.reshape(*x.shape[:2], -1)',
        },
    ),
)

_SOFTMAX = _Line(
    'linen_trainer', '        weights = jax.nn.softmax(scores)\n', 'jax.nn.softmax(scores)'
)
_KEYS = _Line(
    'linen_trainer',
    "        k_BLHK = constrain(k_BLHK, ('batch', 'length', 'heads', 'kv'))\n",
    '(k_BLHK,',
)
_DOWN = _Line('linen_trainer', '        out_BLD = hidden_BLF @ down\n', 'hidden_BLF')
_UP = _Line('linen_trainer', _HIDDEN, 'x_BLD @ up')
_LOOKUP = _Line(
    'linen_trainer',
    "        x_BLD = constrain(table[tokens_BL], ('batch', 'length', 'embed'))\n",
    'table[tokens_BL]',
)
_VALUE = _Line('linen_trainer', '    return jnp.mean(log_z_BL - found_BL)\n', 'found_BL)')
_PLAIN_SOFTMAX = _Line(
    'plain_trainer',
    "    weights = jax.nn.softmax(jnp.einsum('blhk,bmhk->bhlm', q, k) / KV**0.5)\n",
    'KV**0.5)',
)
_PLAIN_VALUES = _Line(
    'plain_trainer',
    "    mixed = jnp.einsum('bhlm,bmhk->blhk', weights, v)\n",
    'weights, v)',
)
_PLAIN_DOWN = _Line(
    'plain_trainer',
    "    x = lay_out(x + hidden @ w['down'], P('data', None, None))\n",
    'x + hidden',
)
_PLAIN_UP = _Line('plain_trainer', _PLAIN_HIDDEN, "x @ w['up']")
_PLAIN_LOOKUP = _Line(
    'plain_trainer',
    "    x = lay_out(params['embedding'][tokens], P('data', None, None))\n",
    "params['embedding'][tokens]",
)
_PLAIN_VALUE = _Line('plain_trainer', '    return jnp.mean(log_z - found)\n', 'found)')
_OWN_UP = _Line(
    'our_transformer',
    "        hidden_BLF *= _named_product(c, x_BLD, p, 'up')\n",
    "_named_product(c, x_BLD, p, 'up')",
    LAYERS,
)
_OWN_NORM = _Line(
    'our_transformer',
    "    normed_BLD = gather_length(normalize(config, params['mlp_norm'], x_BLD))\n",
    "normalize(config, params['mlp_norm'], x_BLD)",
    LAYERS,
)
_OWN_ATTENDED = _Line(
    'our_transformer',
    "    attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))\n",
    '(attended_BLHN,',
    ATTENTION,
)

_HEADS, _ROWS = 'heads that see each other', 'rows that see each other'
_JOINED, _REPEATED = 'joined along a sharded dimension', 'repeated heads'
_PRODUCT, _METRIC = 'lookup by a product', 'metric in the loss'
_SET_4: Table = (
    (
        _HEADS,
        _SOFTMAX,
        {
            'softmax over heads': 'jax.nn.softmax(scores, axis=1)',
            'the largest head': 'jax.nn.softmax(scores - scores.max(1, keepdims=True))',
            'sorted heads': 'jax.nn.softmax(jnp.sort(scores, axis=1))',
            'heads in reverse': 'jax.nn.softmax(scores)[:, ::-1]',
        },
    ),
    (
        _REPEATED,
        _KEYS,
        {
            'two of eight': '(jnp.repeat(k_BLHK[:, :, :2], 4, axis=2),',
            'tiled': '(jnp.tile(k_BLHK[:, :, 4:], (1, 1, 2, 1)),',
        },
    ),
    (
        _ROWS,
        _DOWN,
        {
            'rows divided otherwise': 'hidden_BLF.reshape(LENGTH, BATCH, HIDDEN).swapaxes(0, 1)',
            'rows in reverse': 'hidden_BLF[::-1]',
            'shuffled rows': 'hidden_BLF[jnp.arange(BATCH) ^ 1]',
            'sorted rows': 'jnp.sort(hidden_BLF, axis=0)',
        },
    ),
    (
        _JOINED,
        _UP,
        {
            'interleaved': 'jnp.stack([x_BLD @ up, -(x_BLD @ up)], -1)'
            '.reshape(BATCH, LENGTH, -1)[..., :HIDDEN]',
            'halves in turn': 'jnp.concatenate(jnp.split(x_BLD @ up, 2, -1)[::-1], -1)',
        },
    ),
    ('constraint before the product', _Line('linen_trainer', _HIDDEN, _HIDDEN), {'gelu': _EARLY}),
    (_PRODUCT, _LOOKUP, {'one-hot': 'jax.nn.one_hot(tokens_BL, VOCAB) @ table'}),
    (
        _METRIC,
        _VALUE,
        {
            'top 5': 'found_BL) + 0 * jnp.mean(jax.lax.top_k(logits_BLV, 5)[0])',
            'rank': 'found_BL) + 0 * jnp.mean(jnp.argsort(logits_BLV, axis=-1)[..., 0])',
            'largest': 'found_BL) + 0 * jnp.mean(jnp.argmax(logits_BLV, axis=-1))',
        },
    ),
    (
        _HEADS,
        _PLAIN_SOFTMAX,
        {
            'softmax over heads': 'KV**0.5, axis=1)',
            'heads in reverse': 'KV**0.5)[:, ::-1]',
            'heads of neighbours': 'KV**0.5)[:, jnp.arange(HEADS) ^ 4]',
        },
    ),
    (
        _REPEATED,
        _PLAIN_VALUES,
        {
            'two of eight': 'weights, jnp.repeat(v[:, :, :2], 4, axis=2))',
            'tiled': 'weights, jnp.tile(v[:, :, :4], (1, 1, 2, 1)))',
        },
    ),
    (
        _ROWS,
        _PLAIN_DOWN,
        {
            'rows in reverse': 'x[::-1] + hidden',
            'shuffled rows': 'x[jnp.arange(BATCH) ^ 1] + hidden',
            'hidden layers of other rows': 'x + hidden[jnp.arange(BATCH) ^ 16]',
            'sorted rows': 'jnp.sort(x, axis=0) + hidden',
        },
    ),
    (
        'constraint before the product',
        _Line('plain_trainer', _PLAIN_HIDDEN, _PLAIN_HIDDEN),
        {'relu': _PLAIN_EARLY},
    ),
    (
        _JOINED,
        _PLAIN_UP,
        {'halves in turn': "jnp.concatenate(jnp.split(x @ w['up'], 2, -1)[::-1], -1)"},
    ),
    (_PRODUCT, _PLAIN_LOOKUP, {'one-hot': "jax.nn.one_hot(tokens, VOCAB) @ params['embedding']"}),
    (
        _METRIC,
        _PLAIN_VALUE,
        {
            'top 5': 'found) + 0 * jnp.mean(jax.lax.top_k(logits, 5)[0])',
            'largest': 'found) + 0 * jnp.mean(jnp.argmax(logits, axis=-1))',
        },
    ),
    (
        _JOINED,
        _OWN_UP,
        {
            'in reverse': "_named_product(c, x_BLD, p, 'up')[..., ::-1]",
            'shifted': "jnp.roll(_named_product(c, x_BLD, p, 'up'), 1, -1)",
        },
    ),
    (
        _ROWS,
        _OWN_NORM,
        {
            'rows in reverse': "normalize(config, params['mlp_norm'], x_BLD)[::-1]",
            'shifted rows': "normalize(config, params['mlp_norm'], jnp.roll(x_BLD, 1, 0))",
        },
    ),
    (
        _HEADS,
        _OWN_ATTENDED,
        {
            'heads in reverse': '(attended_BLHN[:, :, ::-1],',
            'sorted heads': '(jnp.sort(attended_BLHN, axis=2),',
        },
    ),
)


def operation_faults(number: int) -> Iterator[Fault]:
    """Yields the faults of operations in set 3 or 4."""
    for kind, line, texts in {3: _SET_3, 4: _SET_4}[number]:
        file = line.file or FILES[line.program]
        yield from rewritten(line.program, file, kind, line.text, line.part, texts)


def gradient_faults() -> Iterator[Fault]:
    """Yields gradients that are laid out whole, or joined for a norm (set 4)."""
    joined = 'jnp.linalg.norm(jnp.concatenate([g.ravel() for g in jax.tree.leaves({0})]))'
    linen, plain = FILES['linen_trainer'], FILES['plain_trainer']
    update = '    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)\n'
    momentum = '    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)\n'
    cast = '            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)\n'
    norm = "            'gradient_norm': global_norm(grads),\n"
    parameters = "            'parameter_norm': optax.tree.norm(new_state.params),\n"
    whole = 'jax.tree.map(lambda g: constrain(g, (None,) * g.ndim), gradient)'
    divided = f'jax.tree.map(lambda g: g / {joined.format("gradient")}, gradient)'
    own_whole = 'with_sharding_constraint(g.astype(p.dtype), jax.sharding.PartitionSpec())'
    for program, file, kind, line, part, text in (
        ('linen_trainer', linen, 'whole gradient', update, 'gradient', whole),
        ('linen_trainer', linen, 'joined for a norm', update, 'gradient', divided),
        ('plain_trainer', plain, 'whole gradient', momentum, '+ g', '+ lay_out(g, P())'),
        (
            'plain_trainer',
            plain,
            'joined for a norm',
            momentum,
            '+ g',
            f'+ g / {joined.format("gradient")}',
        ),
        ('our_transformer', STEPS, 'whole gradient', cast, 'g.astype(p.dtype)', own_whole),
        (
            'our_transformer',
            STEPS,
            'joined for a norm',
            norm,
            'global_norm(grads)',
            joined.format('grads'),
        ),
        (
            'our_transformer',
            STEPS,
            'joined for a norm',
            parameters,
            'optax.tree.norm(new_state.params)',
            joined.format('new_state.params'),
        ),
    ):
        yield edit(program, file, kind, part, line, line.replace(part, text, 1), suggested=True)
