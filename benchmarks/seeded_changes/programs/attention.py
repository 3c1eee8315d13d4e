"""A language model over data and model axes, whose layouts come from a table of rules."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, VOCAB, EMBED, HEADS, SIZE, MLP = 2, 1024, 256, 8, 32, 1024
BATCH, LENGTH = 16, 128

RULES = {
    'batch': 'data',
    'length': None,
    'vocab': 'model',
    'embed': None,
    'heads': 'model',
    'size': None,
    'mlp': 'model',
    'layers': None,
}
SHAPES = {
    'embedding': ((VOCAB, EMBED), ('vocab', 'embed')),
    'query': ((LAYERS, EMBED, HEADS, SIZE), ('layers', 'embed', 'heads', 'size')),
    'key': ((LAYERS, EMBED, HEADS, SIZE), ('layers', 'embed', 'heads', 'size')),
    'value': ((LAYERS, EMBED, HEADS, SIZE), ('layers', 'embed', 'heads', 'size')),
    'out': ((LAYERS, HEADS, SIZE, EMBED), ('layers', 'heads', 'size', 'embed')),
    'up': ((LAYERS, EMBED, MLP), ('layers', 'embed', 'mlp')),
    'down': ((LAYERS, MLP, EMBED), ('layers', 'mlp', 'embed')),
}
COMPUTE = jnp.bfloat16


def build():
    mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

    def layout(names):
        return NamedSharding(mesh, P(*(RULES[name] for name in names)))

    def constrain(x, names):
        return jax.lax.with_sharding_constraint(x, layout(names))

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout(names))
        for name, (shape, names) in SHAPES.items()
    }
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=layout(('batch', 'length')))

    def attend(x, weights):
        query = jnp.einsum('ble,ehs->blhs', x, weights['query'])
        key = jnp.einsum('ble,ehs->blhs', x, weights['key'])
        value = jnp.einsum('ble,ehs->blhs', x, weights['value'])
        query = constrain(query, ('batch', 'length', 'heads', 'size'))
        scores = jnp.einsum('blhs,bmhs->bhlm', query, key).astype(jnp.float32)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        shares = jax.nn.softmax(jnp.where(mask, scores / SIZE**0.5, -1e9), axis=-1)
        mixed = jnp.einsum('bhlm,bmhs->blhs', shares.astype(COMPUTE), value)
        return jnp.einsum('blhs,hse->ble', mixed, weights['out'])

    def feed_forward(x, weights):
        hidden = jax.nn.relu(x @ weights['up'])
        hidden = constrain(hidden, ('batch', 'length', 'mlp'))
        return hidden @ weights['down']

    def layer(x, weights):
        weights = jax.tree.map(lambda w: w.astype(COMPUTE), weights)
        x = x + attend(x, weights)
        x = x + feed_forward(x, weights)
        return constrain(x, ('batch', 'length', 'embed')), None

    def loss_of(params, tokens):
        x = params['embedding'].astype(COMPUTE)[tokens]
        x = constrain(x, ('batch', 'length', 'embed'))
        layers = {name: params[name] for name in params if name != 'embedding'}
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
        logits = jnp.einsum('ble,ve->blv', x, params['embedding'].astype(COMPUTE))
        logits = constrain(logits, ('batch', 'length', 'vocab')).astype(jnp.float32)
        target = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), VOCAB)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * target, axis=-1))

    def train_step(params, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    states = jax.tree.map(lambda a: a.sharding, params)
    return jax.jit(
        train_step, donate_argnums=(0,), out_shardings=(states, NamedSharding(mesh, P()))
    ), (params, tokens)
