"""Small trained adapters on frozen tensor-parallel layers, with dataclasses for the weights."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, RANK, WORDS, LAYERS = 8, 128, 512, 8, 1024, 16, 2048, 2


@jax.tree_util.register_dataclass
@dataclass
class Frozen:
    words: jax.ShapeDtypeStruct
    heads: jax.ShapeDtypeStruct
    mix: jax.ShapeDtypeStruct
    gate: jax.ShapeDtypeStruct
    down: jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclass
class Adapter:
    low: jax.ShapeDtypeStruct
    high: jax.ShapeDtypeStruct


def build():
    mesh = jax.make_mesh((2, 4), ('batch', 'shard'), axis_types=(AxisType.Auto, AxisType.Auto))

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def leaf(shape, spec=(), dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at(*spec))

    size = WIDTH // HEADS
    frozen = Frozen(
        words=leaf((WORDS, WIDTH), ('shard', None)),
        heads=leaf((LAYERS, WIDTH, 3, HEADS, size), (None, None, None, 'shard', None)),
        mix=leaf((LAYERS, HEADS, size, WIDTH), (None, 'shard', None, None)),
        gate=leaf((LAYERS, WIDTH, HIDDEN), (None, None, 'shard')),
        down=leaf((LAYERS, HIDDEN, WIDTH), (None, 'shard', None)),
    )
    adapter = Adapter(
        low=leaf((LAYERS, WIDTH, RANK), (), jnp.float32),
        high=leaf((LAYERS, RANK, HIDDEN), (None, None, 'shard'), jnp.float32),
    )
    optimizer = optax.sgd(1e-2, momentum=0.9, accumulator_dtype=jnp.float32)
    memory = optax.tree_map_params(
        optimizer, lambda _, leaf: leaf, jax.eval_shape(optimizer.init, adapter), adapter
    )
    tokens = leaf((BATCH, LENGTH), ('batch',), jnp.int32)
    targets = leaf((BATCH, LENGTH), ('batch',), jnp.int32)

    def scaled(x):
        return x * lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)

    def attend(x, heads, mix):
        q, k, v = jnp.einsum('btd,dchk->cbthk', x, heads)
        q = lax.with_sharding_constraint(q, at('batch', None, 'shard', None))
        scores = jnp.einsum('bqhk,bthk->bhqt', q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores / size**0.5, -1e9)
        shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum('bhqt,bthk->bqhk', shares, v)
        return jnp.einsum('bqhk,hkd->bqd', mixed, mix)

    def layer(x, weights):
        base, extra = weights
        h = scaled(x).astype(jnp.bfloat16)
        x = x + attend(h, base.heads, base.mix)
        x = lax.with_sharding_constraint(x, at('batch', None, None))
        h = scaled(x).astype(jnp.bfloat16)
        change = (h @ extra.low.astype(h.dtype)) @ extra.high.astype(h.dtype)
        hidden = jax.nn.silu(h @ base.gate + change)
        hidden = lax.with_sharding_constraint(hidden, at('batch', None, 'shard'))
        x = x + hidden @ base.down
        return lax.with_sharding_constraint(x, at('batch', None, None)), None

    def loss_of(adapter, frozen, tokens, targets):
        x = frozen.words[tokens]
        x = lax.with_sharding_constraint(x, at('batch', None, None))
        base = jax.tree.map(lambda w: w, frozen)
        stacked = Frozen(None, base.heads, base.mix, base.gate, base.down)
        body = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
        x, _ = lax.scan(body, x, (stacked, adapter))
        logits = jnp.einsum('btd,vd->btv', scaled(x).astype(jnp.bfloat16), base.words)
        logits = lax.with_sharding_constraint(logits, at('batch', None, 'shard'))
        logits = logits.astype(jnp.float32)
        hit = jnp.sum(jnp.where(targets[..., None] == jnp.arange(WORDS), logits, 0.0), -1)
        return jnp.mean(jax.scipy.special.logsumexp(logits, -1) - hit)

    @partial(jax.jit, donate_argnums=(1, 2))
    def tune(frozen, adapter, memory, tokens, targets):
        loss, grads = jax.value_and_grad(loss_of)(adapter, frozen, tokens, targets)
        updates, memory = optimizer.update(grads, memory, adapter)
        return optax.apply_updates(adapter, updates), memory, loss

    return tune, (frozen, adapter, memory, tokens, targets)
