"""A denoiser of tokens in nnx, fully sharded, with Adam and a moving average of the weights."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

BATCH, TOKENS, WIDTH, HEADS, BLOCKS = 32, 128, 512, 8, 1


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.shift = nnx.Linear(WIDTH, 2 * WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x, time):
        shift, scale = jnp.split(self.shift(nnx.silu(time))[:, None], 2, axis=-1)
        h = self.norm(x) * (1 + scale) + shift
        q, k, v = jnp.moveaxis(self.qkv(h).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + checkpoint_name(self.out(mixed), 'mixed')
        hidden = checkpoint_name(nnx.gelu(self.up(self.norm(x))), 'hidden')
        return x + self.down(hidden)


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.time = nnx.Linear(256, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.last = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x, t):
        angles = t[:, None] * jnp.exp(-jnp.arange(128) / 14.0)
        time = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        x = x.astype(jnp.bfloat16)
        policy = jax.checkpoint_policies.save_only_these_names('mixed')
        for block in self.blocks:
            graph, weights = nnx.split(block)
            run = jax.checkpoint(lambda w, x, t, g=graph: nnx.merge(g, w)(x, t), policy=policy)
            x = run(weights, x, time)
        return self.last(x.astype(jnp.float32))


def build():
    mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P('fsdp'))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4, b2=0.99))
    model = nnx.eval_shape(lambda: Denoiser(nnx.Rngs(0)))
    graph, weights = nnx.split(model)

    def layout(leaf):
        if leaf.size < 4096:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P('fsdp', None))

    def described(tree):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout(leaf)), tree
        )

    params = described(weights)
    moments = described(jax.eval_shape(optimizer.init, weights))
    average = described(weights)
    images = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32, sharding=rows)
    noise = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32, sharding=rows)
    times = jax.ShapeDtypeStruct((BATCH,), jnp.float32, sharding=rows)

    def loss_of(weights, images, noise, times):
        level = times[:, None, None]
        noisy = jnp.sqrt(1 - level) * images + jnp.sqrt(level) * noise
        noisy = jax.lax.with_sharding_constraint(noisy, rows)
        guess = nnx.merge(graph, weights)(noisy, 1000.0 * times)
        return jnp.mean(jnp.square(guess - noise))

    def train(params, moments, average, images, noise, times):
        loss, slopes = jax.value_and_grad(loss_of)(params, images, noise, times)
        slopes = jax.tree.map(lambda g: jax.lax.with_sharding_constraint(g, layout(g)), slopes)
        updates, moments = optimizer.update(slopes, moments, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, average, params)
        return params, moments, average, loss

    kept = jax.tree.map(lambda leaf: leaf.sharding, (params, moments, average))
    jitted = jax.jit(
        train, donate_argnums=(0, 1, 2), out_shardings=(*kept, NamedSharding(mesh, P()))
    )
    return jitted, (params, moments, average, images, noise, times)
