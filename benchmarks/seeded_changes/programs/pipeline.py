"""Four stages in a shard_map: microbatches go from one to the next, and the last has the loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STAGES, DEPTH, WIDTH, HIDDEN = 4, 2, 512, 1024
PARTS, ROWS = 8, 64


def make_mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, STAGES), ('replica', 'stage'))


def normalize(x):
    x = x.astype(jnp.float32)
    return (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


def one_layer(x, weights):
    hidden = jax.nn.relu(normalize(x) @ weights['enter'].astype(jnp.bfloat16))
    return x + (hidden @ weights['leave'].astype(jnp.bfloat16)), None


@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
def one_stage(weights, x):
    x, _ = lax.scan(one_layer, x, weights)
    return x


def local_loss(weights, x, y):
    weights = jax.tree.map(lambda w: lax.pcast(w[0], 'replica', to='varying'), weights)
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.float32)
    place, last = lax.axis_index('stage'), STAGES - 1
    onward = [(i, i + 1) for i in range(last)]

    def tick(carry, time):
        arriving, total = carry
        fresh = x[jnp.clip(time, 0, PARTS - 1)]
        done = one_stage(weights, jnp.where(place == 0, fresh, arriving))
        wanted = y[jnp.clip(time - last, 0, PARTS - 1)]
        error = jnp.mean(jnp.square(done.astype(jnp.float32) - wanted))
        counts = (place == last) & (time >= last)
        total = total + jnp.where(counts, error, 0.0)
        return (lax.ppermute(done, 'stage', onward), total), None

    start = lax.pcast(
        (jnp.zeros(x.shape[1:], x.dtype), jnp.float32(0)), ('replica', 'stage'), to='varying'
    )
    (_, total), _ = lax.scan(tick, start, jnp.arange(PARTS + last))
    total = lax.psum(total, 'stage') / PARTS
    return lax.pmean(total, 'replica')


def build():
    mesh = make_mesh()

    def argument(shape, dtype, *names):
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = {
        'enter': argument((STAGES, DEPTH, WIDTH, HIDDEN), jnp.float32, 'stage'),
        'leave': argument((STAGES, DEPTH, HIDDEN, WIDTH), jnp.float32, 'stage'),
    }
    speed = {
        'enter': argument((STAGES, DEPTH, WIDTH, HIDDEN), jnp.float32, 'stage', None, 'replica'),
        'leave': argument((STAGES, DEPTH, HIDDEN, WIDTH), jnp.float32, 'stage', None, 'replica'),
    }
    features = argument((PARTS, 2 * ROWS, WIDTH), jnp.float32, None, 'replica')
    labels = argument((PARTS, 2 * ROWS, WIDTH), jnp.float32, None, 'replica')

    loss_of = jax.shard_map(
        local_loss,
        mesh=mesh,
        in_specs=(
            PartitionSpec('stage'),
            PartitionSpec(None, 'replica'),
            PartitionSpec(None, 'replica'),
        ),
        out_specs=PartitionSpec(),
    )

    @partial(jax.jit, donate_argnames=('weights', 'speed'))
    def update(weights, speed, features, labels):
        loss, slopes = jax.value_and_grad(loss_of)(weights, features, labels)
        shared = jax.tree.map(lambda s: s.sharding, layouts)
        slopes = lax.with_sharding_constraint(slopes, shared)
        speed = jax.tree.map(lambda s, g: 0.95 * s + g, speed, slopes)
        changed = jax.tree.map(lambda w, s: w - 0.05 * s, weights, speed)
        whole = NamedSharding(mesh, PartitionSpec('stage'))
        changed = lax.with_sharding_constraint(changed, {'enter': whole, 'leave': whole})
        return changed, speed, loss

    layouts = speed
    return update, (weights, speed, features, labels)
