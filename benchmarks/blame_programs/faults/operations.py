"""Faults of operations in layers and on gradients, which need a sharded dimension whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.blame_programs.faults.fault import Fault, edit, find_line

# A kind of faults and a program; a line of it; and other texts for the part in braces.
_SET_3 = """\
operation in a layer, linen_trainer
  hidden_BLF = constrain(jax.nn.gelu({x_BLD @ up}), ('batch', 'length', 'mlp'))
    flip of the hidden layer: (x_BLD @ up)[..., ::-1]
    sort of the hidden layer: jnp.sort(x_BLD @ up)
    cumsum over rows: jnp.cumsum(x_BLD, axis=0) @ up
operation in a layer, linen_trainer
  weights = jax.nn.softmax({scores)}
    roll over heads: jnp.roll(scores, 1, axis=1))
operation in a layer, plain_trainer
  hidden = lay_out(jax.nn.relu({x @ w['up']}), P('data', None, 'model'))
    roll over rows: jnp.roll(x, 1, axis=0) @ w['up']
    flip of the hidden layer: jnp.flip(x @ w['up'], -1)
    cumulative maximum: jax.lax.cummax(x @ w['up'], axis=2)
    flattened: jnp.roll((x @ w['up']).reshape(x.shape[0], -1), 1, -1).reshape(*x.shape[:2], -1)
"""
_SET_4 = """\
heads that see each other, linen_trainer
  weights = {jax.nn.softmax(scores)}
    softmax over heads: jax.nn.softmax(scores, axis=1)
    the largest head: jax.nn.softmax(scores - scores.max(1, keepdims=True))
    sorted heads: jax.nn.softmax(jnp.sort(scores, axis=1))
    heads in reverse: jax.nn.softmax(scores)[:, ::-1]
repeated heads, linen_trainer
  k_BLHK = constrain{(k_BLHK,} ('batch', 'length', 'heads', 'kv'))
    two of eight: (jnp.repeat(k_BLHK[:, :, :2], 4, axis=2),
    tiled: (jnp.tile(k_BLHK[:, :, 4:], (1, 1, 2, 1)),
rows that see each other, linen_trainer
  out_BLD = {hidden_BLF} @ down
    rows divided otherwise: hidden_BLF.reshape(LENGTH, BATCH, HIDDEN).swapaxes(0, 1)
    rows in reverse: hidden_BLF[::-1]
    shuffled rows: hidden_BLF[jnp.arange(BATCH) ^ 1]
    sorted rows: jnp.sort(hidden_BLF, axis=0)
joined along a sharded dimension, linen_trainer
  hidden_BLF = constrain(jax.nn.gelu({x_BLD @ up}), ('batch', 'length', 'mlp'))
    interleaved: jnp.stack([x_BLD @ up, -(x_BLD @ up)], -1).reshape(BATCH, LENGTH, -1)[..., :HIDDEN]
    halves in turn: jnp.concatenate(jnp.split(x_BLD @ up, 2, -1)[::-1], -1)
constraint before the product, linen_trainer
  {hidden_BLF = constrain(jax.nn.gelu(x_BLD @ up), ('batch', 'length', 'mlp'))}
    gelu: hidden_BLF = jax.nn.gelu(constrain(x_BLD, ('batch', 'length', 'mlp')) @ up)
lookup by a product, linen_trainer
  x_BLD = constrain({table[tokens_BL]}, ('batch', 'length', 'embed'))
    one-hot: jax.nn.one_hot(tokens_BL, VOCAB) @ table
metric in the loss, linen_trainer
  return jnp.mean(log_z_BL - {found_BL)}
    top 5: found_BL) + 0 * jnp.mean(jax.lax.top_k(logits_BLV, 5)[0])
    rank: found_BL) + 0 * jnp.mean(jnp.argsort(logits_BLV, axis=-1)[..., 0])
    largest: found_BL) + 0 * jnp.mean(jnp.argmax(logits_BLV, axis=-1))
heads that see each other, plain_trainer
  weights = jax.nn.softmax(jnp.einsum('blhk,bmhk->bhlm', q, k) / {KV**0.5)}
    softmax over heads: KV**0.5, axis=1)
    heads in reverse: KV**0.5)[:, ::-1]
    heads of neighbours: KV**0.5)[:, jnp.arange(HEADS) ^ 4]
repeated heads, plain_trainer
  mixed = jnp.einsum('bhlm,bmhk->blhk', {weights, v)}
    two of eight: weights, jnp.repeat(v[:, :, :2], 4, axis=2))
    tiled: weights, jnp.tile(v[:, :, :4], (1, 1, 2, 1)))
rows that see each other, plain_trainer
  x = lay_out({x + hidden} @ w['down'], P('data', None, None))
    rows in reverse: x[::-1] + hidden
    shuffled rows: x[jnp.arange(BATCH) ^ 1] + hidden
    hidden layers of other rows: x + hidden[jnp.arange(BATCH) ^ 16]
    sorted rows: jnp.sort(x, axis=0) + hidden
constraint before the product, plain_trainer
  {hidden = lay_out(jax.nn.relu(x @ w['up']), P('data', None, 'model'))}
    relu: hidden = jax.nn.relu(lay_out(x, P('data', None, 'model')) @ w['up'])
joined along a sharded dimension, plain_trainer
  hidden = lay_out(jax.nn.relu({x @ w['up']}), P('data', None, 'model'))
    halves in turn: jnp.concatenate(jnp.split(x @ w['up'], 2, -1)[::-1], -1)
lookup by a product, plain_trainer
  x = lay_out({params['embedding'][tokens]}, P('data', None, None))
    one-hot: jax.nn.one_hot(tokens, VOCAB) @ params['embedding']
metric in the loss, plain_trainer
  return jnp.mean(log_z - {found)}
    top 5: found) + 0 * jnp.mean(jax.lax.top_k(logits, 5)[0])
    largest: found) + 0 * jnp.mean(jnp.argmax(logits, axis=-1))
joined along a sharded dimension, our_transformer
  hidden_BLF *= {part('mlp_up')}
    in reverse: part('mlp_up')[..., ::-1]
    shifted: jnp.roll(part('mlp_up'), 1, -1)
rows that see each other, our_transformer
  normed_BLD = gather_length({normalize(config, params['mlp_norm'], x_BLD)})
    rows in reverse: normalize(config, params['mlp_norm'], x_BLD)[::-1]
    shifted rows: normalize(config, params['mlp_norm'], jnp.roll(x_BLD, 1, 0))
heads that see each other, our_transformer
  attended_BLHN = constrain{(attended_BLHN,} ('batch', 'length', 'heads', 'kv'))
    heads in reverse: (attended_BLHN[:, :, ::-1],
    sorted heads: (jnp.sort(attended_BLHN, axis=2),
"""


def operation_faults(number: int) -> Iterator[Fault]:
    """Yields the faults of operations in set 3 or 4."""
    for text in {3: _SET_3, 4: _SET_4}[number].splitlines():
        indent, words = len(text) - len(text.lstrip()), text.strip()
        if indent == 0:
            kind, program = words.split(', ')
        elif indent == 2:
            before, part, after = re.fullmatch(r'(.*)\{(.*)\}(.*)', words).groups()
            file, line = find_line(program, before + part + after)
        else:
            place, other = words.split(': ', 1)
            new = line.replace(f'{before}{part}', f'{before}{other}')
            yield edit(program, file, kind, place, line, new, suggested=True)


def gradient_faults() -> Iterator[Fault]:
    """Yields gradients that are laid out whole, or joined for a norm (set 4)."""
    joined = 'jnp.linalg.norm(jnp.concatenate([g.ravel() for g in jax.tree.leaves({0})]))'
    update = 'updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)'
    momentum = 'momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)'
    cast = 'grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)'
    norm = "'gradient_norm': global_norm(grads),"
    parameters = "'parameter_norm': optax.tree.norm(new_state.params),"
    whole = 'jax.tree.map(lambda g: constrain(g, (None,) * g.ndim), gradient)'
    divided = f'jax.tree.map(lambda g: g / {joined.format("gradient")}, gradient)'
    plain = f'+ g / {joined.format("gradient")}'
    own_whole = 'with_sharding_constraint(g.astype(p.dtype), jax.sharding.PartitionSpec())'
    own, of_params, for_norm = 'our_transformer', 'new_state.params', 'joined for a norm'
    for program, kind, text, part, new in (
        ('linen_trainer', 'whole gradient', update, 'gradient', whole),
        ('linen_trainer', for_norm, update, 'gradient', divided),
        ('plain_trainer', 'whole gradient', momentum, '+ g', '+ lay_out(g, P())'),
        ('plain_trainer', for_norm, momentum, '+ g', plain),
        (own, 'whole gradient', cast, 'g.astype(p.dtype)', own_whole),
        (own, for_norm, norm, 'global_norm(grads)', joined.format('grads')),
        (own, for_norm, parameters, f'optax.tree.norm({of_params})', joined.format(of_params)),
    ):
        file, line = find_line(program, text)
        yield edit(program, file, kind, part, line, line.replace(part, new, 1), suggested=True)
