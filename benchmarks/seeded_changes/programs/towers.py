"""Two linen towers that learn to match, laid out by rules for the names of their weights."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec as PS

ROWS, FEATURES, WIDTH, HIDDEN, MEETING = 256, 512, 512, 2048, 256

RULES = (
    (r'.*/enter/kernel', PS(None, 'tensor')),
    (r'.*/widen/kernel', PS(None, 'tensor')),
    (r'.*/narrow/kernel', PS('tensor', None)),
    (r'.*/meet/kernel', PS('tensor', None)),
    (r'.*/widen/bias', PS('tensor')),
    (r'.*', PS()),
)


class Tower(nn.Module):
    mesh: jax.sharding.Mesh
    depth: int

    def lay(self, x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PS(*axes)))

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.bfloat16)
        x = nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name='enter')(x)
        x = self.lay(x, 'data', None)
        for i in range(self.depth):
            x = x + self.block(x, i)
        x = self.lay(x, 'data', 'tensor')
        x = nn.Dense(MEETING, use_bias=False, dtype=jnp.bfloat16, name='meet')(x)
        x = x.astype(jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def block(self, x, i):
        h = nn.LayerNorm(use_bias=False, dtype=jnp.bfloat16, name=f'norm{i}')(x)
        h = nn.Dense(HIDDEN, dtype=jnp.bfloat16, name=f'block{i}/widen')(h)
        h = self.lay(nn.gelu(h), 'data', 'tensor')
        h = nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name=f'block{i}/narrow')(h)
        return self.lay(h, 'data', None)


def spec_of(path):
    name = '/'.join(str(part) for part in path)
    for pattern, spec in RULES:
        if re.fullmatch(pattern, name):
            return spec
    raise KeyError(name)


def build():
    mesh = jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)
    left, right = Tower(mesh, depth=2), Tower(mesh, depth=1)
    optimizer = optax.adamw(1e-3, weight_decay=0.01, mu_dtype=jnp.bfloat16)

    def start():
        x = jnp.zeros((4, FEATURES))
        first, second = jax.random.split(jax.random.key(0))
        params = {
            'left': left.init(first, x)['params'],
            'right': right.init(second, x)['params'],
            'scale': jnp.zeros(()),
        }
        return params, optimizer.init(params)

    def place(tree):
        flat = flatten_dict(tree)
        laid = {
            path: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec_of(path))
            )
            for path, leaf in flat.items()
        }
        return unflatten_dict(laid)

    params, state = jax.eval_shape(start)
    params = place(params)
    whole = NamedSharding(mesh, PS())
    adam = state[0]._replace(
        count=jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        mu=place(state[0].mu),
        nu=place(state[0].nu),
    )
    state = (adam, *state[1:])
    inputs = NamedSharding(mesh, PS('data', None))
    texts = jax.ShapeDtypeStruct((ROWS, FEATURES), jnp.float32, sharding=inputs)
    sounds = jax.ShapeDtypeStruct((ROWS, FEATURES), jnp.float32, sharding=inputs)

    def loss_of(params, texts, sounds):
        a = left.apply({'params': params['left']}, texts)
        b = right.apply({'params': params['right']}, sounds)
        b = jax.lax.with_sharding_constraint(b, whole)
        table = jnp.exp(params['scale']) * (a @ b.T)
        table = jax.lax.with_sharding_constraint(table, inputs)
        pairs = jnp.arange(ROWS)
        rows = optax.softmax_cross_entropy_with_integer_labels(table, pairs)
        columns = optax.softmax_cross_entropy_with_integer_labels(table.T, pairs)
        return 0.5 * (jnp.mean(rows) + jnp.mean(columns))

    def learn(params, state, texts, sounds):
        loss, grads = jax.value_and_grad(loss_of)(params, texts, sounds)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {'loss': loss}

    layouts = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    learn = jax.jit(learn, donate_argnums=(0, 1), out_shardings=(*layouts, {'loss': whole}))
    return learn, (params, state, texts, sounds)
