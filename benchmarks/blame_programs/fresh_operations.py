"""Faults for seed 4: operations that mix rows or heads, or need a sharded dimension whole."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.blame_programs.fault_kinds import LINEN, PLAIN, Fault, edit

_LAYERS = 'train/models/layers.py'
_ATTENTION = 'train/models/attention.py'


def _edits(
    program: str, file: str, kind: str, old: str, part: str, texts: dict[str, str]
) -> Iterator[Fault]:
    """Lines in which a part is written otherwise, by what the fault is called."""
    for place, text in texts.items():
        yield edit(program, file, kind, place, old, old.replace(part, text, 1), suggested=True)


def fresh_operations() -> Iterator[Fault]:
    """Yields the faults of operations that seed 4 draws from."""
    yield from _linen_operations()
    yield from _plain_operations()
    yield from _own_operations()


def _linen_operations() -> Iterator[Fault]:
    program, file = 'linen_trainer', LINEN
    softmax = '        weights = jax.nn.softmax(scores)\n'
    yield from _edits(
        program,
        file,
        'heads that see each other',
        softmax,
        'jax.nn.softmax(scores)',
        {
            'softmax over heads': 'jax.nn.softmax(scores, axis=1)',
            'the largest head': 'jax.nn.softmax(scores - scores.max(1, keepdims=True))',
            'sorted heads': 'jax.nn.softmax(jnp.sort(scores, axis=1))',
            'heads in reverse': 'jax.nn.softmax(scores)[:, ::-1]',
        },
    )
    keys = "        k_BLHK = constrain(k_BLHK, ('batch', 'length', 'heads', 'kv'))\n"
    yield from _edits(
        program,
        file,
        'repeated heads',
        keys,
        '(k_BLHK,',
        {
            'two of eight': '(jnp.repeat(k_BLHK[:, :, :2], 4, axis=2),',
            'tiled': '(jnp.tile(k_BLHK[:, :, 4:], (1, 1, 2, 1)),',
        },
    )
    rows = '        out_BLD = hidden_BLF @ down\n'
    turned = 'hidden_BLF.reshape(LENGTH, BATCH, HIDDEN).swapaxes(0, 1)'
    yield from _edits(
        program,
        file,
        'rows that see each other',
        rows,
        'hidden_BLF',
        {
            'rows divided otherwise': turned,
            'rows in reverse': 'hidden_BLF[::-1]',
            'shuffled rows': 'hidden_BLF[jnp.arange(BATCH) ^ 1]',
            'sorted rows': 'jnp.sort(hidden_BLF, axis=0)',
        },
    )
    hidden = "        hidden_BLF = constrain(jax.nn.gelu(x_BLD @ up), ('batch', 'length', 'mlp'))\n"
    early = "jax.nn.gelu(constrain(x_BLD, ('batch', 'length', 'mlp')) @ up)\n"
    stacked = 'jnp.stack([x_BLD @ up, -(x_BLD @ up)], -1).reshape(BATCH, LENGTH, -1)[..., :HIDDEN]'
    yield from _edits(
        program,
        file,
        'joined along a sharded dimension',
        hidden,
        'x_BLD @ up',
        {
            'interleaved': stacked,
            'halves in turn': 'jnp.concatenate(jnp.split(x_BLD @ up, 2, -1)[::-1], -1)',
        },
    )
    yield edit(
        program,
        file,
        'constraint before the product',
        'gelu',
        hidden,
        f'        hidden_BLF = {early}',
        suggested=True,
    )
    look_up = "        x_BLD = constrain(table[tokens_BL], ('batch', 'length', 'embed'))\n"
    yield from _edits(
        program,
        file,
        'lookup by a product',
        look_up,
        'table[tokens_BL]',
        {'one-hot': 'jax.nn.one_hot(tokens_BL, VOCAB) @ table'},
    )
    value = '    return jnp.mean(log_z_BL - found_BL)\n'
    yield from _edits(
        program,
        file,
        'metric in the loss',
        value,
        'found_BL)',
        {
            'top 5': 'found_BL) + 0 * jnp.mean(jax.lax.top_k(logits_BLV, 5)[0])',
            'rank': 'found_BL) + 0 * jnp.mean(jnp.argsort(logits_BLV, axis=-1)[..., 0])',
            'largest': 'found_BL) + 0 * jnp.mean(jnp.argmax(logits_BLV, axis=-1))',
        },
    )


def _plain_operations() -> Iterator[Fault]:
    program, file = 'plain_trainer', PLAIN
    softmax = "    weights = jax.nn.softmax(jnp.einsum('blhk,bmhk->bhlm', q, k) / KV**0.5)\n"
    yield from _edits(
        program,
        file,
        'heads that see each other',
        softmax,
        'KV**0.5)',
        {
            'softmax over heads': 'KV**0.5, axis=1)',
            'heads in reverse': 'KV**0.5)[:, ::-1]',
            'heads of neighbours': 'KV**0.5)[:, jnp.arange(HEADS) ^ 4]',
        },
    )
    mixed = "    mixed = jnp.einsum('bhlm,bmhk->blhk', weights, v)\n"
    yield from _edits(
        program,
        file,
        'repeated heads',
        mixed,
        'weights, v)',
        {
            'two of eight': 'weights, jnp.repeat(v[:, :, :2], 4, axis=2))',
            'tiled': 'weights, jnp.tile(v[:, :, :4], (1, 1, 2, 1)))',
        },
    )
    down = "    x = lay_out(x + hidden @ w['down'], P('data', None, None))\n"
    yield from _edits(
        program,
        file,
        'rows that see each other',
        down,
        'x + hidden',
        {
            'rows in reverse': 'x[::-1] + hidden',
            'shuffled rows': 'x[jnp.arange(BATCH) ^ 1] + hidden',
            'hidden layers of other rows': 'x + hidden[jnp.arange(BATCH) ^ 16]',
            'sorted rows': 'jnp.sort(x, axis=0) + hidden',
        },
    )
    hidden = "    hidden = lay_out(jax.nn.relu(x @ w['up']), P('data', None, 'model'))\n"
    early = "    hidden = jax.nn.relu(lay_out(x, P('data', None, 'model')) @ w['up'])\n"
    yield edit(
        program, file, 'constraint before the product', 'relu', hidden, early, suggested=True
    )
    yield from _edits(
        program,
        file,
        'joined along a sharded dimension',
        hidden,
        "x @ w['up']",
        {'halves in turn': "jnp.concatenate(jnp.split(x @ w['up'], 2, -1)[::-1], -1)"},
    )
    look_up = "    x = lay_out(params['embedding'][tokens], P('data', None, None))\n"
    yield from _edits(
        program,
        file,
        'lookup by a product',
        look_up,
        "params['embedding'][tokens]",
        {'one-hot': "jax.nn.one_hot(tokens, VOCAB) @ params['embedding']"},
    )
    value = '    return jnp.mean(log_z - found)\n'
    yield from _edits(
        program,
        file,
        'metric in the loss',
        value,
        'found)',
        {
            'top 5': 'found) + 0 * jnp.mean(jax.lax.top_k(logits, 5)[0])',
            'largest': 'found) + 0 * jnp.mean(jnp.argmax(logits, axis=-1))',
        },
    )


def _own_operations() -> Iterator[Fault]:
    """Operations in the layers of the trainer's own model."""
    program = 'our_transformer'
    gated = "        hidden_BLF *= _named_product(c, x_BLD, p, 'up')\n"
    yield from _edits(
        program,
        _LAYERS,
        'joined along a sharded dimension',
        gated,
        "_named_product(c, x_BLD, p, 'up')",
        {
            'in reverse': "_named_product(c, x_BLD, p, 'up')[..., ::-1]",
            'shifted': "jnp.roll(_named_product(c, x_BLD, p, 'up'), 1, -1)",
        },
    )
    normed = "    normed_BLD = gather_length(normalize(config, params['mlp_norm'], x_BLD))\n"
    yield from _edits(
        program,
        _LAYERS,
        'rows that see each other',
        normed,
        "normalize(config, params['mlp_norm'], x_BLD)",
        {
            'rows in reverse': "normalize(config, params['mlp_norm'], x_BLD)[::-1]",
            'shifted rows': "normalize(config, params['mlp_norm'], jnp.roll(x_BLD, 1, 0))",
        },
    )
    attended = "    attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))\n"
    yield from _edits(
        program,
        _ATTENTION,
        'heads that see each other',
        attended,
        '(attended_BLHN,',
        {
            'heads in reverse': '(attended_BLHN[:, :, ::-1],',
            'sorted heads': '(jnp.sort(attended_BLHN, axis=2),',
        },
    )
