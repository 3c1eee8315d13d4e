"""Programs whose exchanges are counted by hand, and the folder that XLA writes about them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

RING = [(i, (i + 1) % 4) for i in range(4)]
# A device has 16 x 16 floats, 1,024 bytes, of 64 x 32: (kind, axes) -> (bytes, executions).
EXCHANGED = {
    ('all-reduce', ('data',)): (2 * 1024 * 3 / 4, 1),
    ('all-gather', ('model',)): (1024, 1),
    ('reduce-scatter', ('data',)): (2048 * 3 / 4, 1),
    ('all-to-all', ('data',)): (1024 * 3 / 4, 1),
    ('all-reduce', ('data', 'model')): (2 * 4 * 7 / 8, 1),
    ('collective-permute', ('data',)): (1024 * 3, 3),
}


def exchange(mesh):
    """A jitted function that exchanges by hand, and its argument."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P('data', 'model'),
        out_specs=P('data', 'model'),
        check_vma=False,
    )
    def exchanges(x):
        summed = jax.lax.psum(x, 'data')
        gathered = jax.lax.all_gather(x, 'model', axis=0, tiled=True)
        scattered = jax.lax.psum_scatter(gathered, 'data', scatter_dimension=0, tiled=True)
        turned = jax.lax.all_to_all(x, 'data', 0, 1, tiled=True)
        total = jax.lax.psum(jnp.sum(x), ('data', 'model'))
        passed = jax.lax.fori_loop(2, 5, lambda i, v: jax.lax.ppermute(1.5 * v, 'data', RING), x)
        parts = jnp.sum(gathered) + jnp.sum(scattered) + jnp.sum(turned)
        return summed + parts + total + passed

    return jax.jit(exchanges), (struct(mesh, (64, 32), 'data', 'model'),)


def train(mesh):
    """A step of FSDP over data and tensor parallelism over model, with 6 layers in a loop."""

    def train_step(params, batch):
        def layer(x, w):
            return x + jax.nn.relu(x @ w['up']) @ w['down'], None

        def loss(params):
            return jnp.mean((jax.lax.scan(layer, batch, params)[0] - batch) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {
        'up': struct(mesh, (6, 64, 256), None, 'data', 'model'),
        'down': struct(mesh, (6, 256, 64), None, 'model', 'data'),
    }
    return jax.jit(train_step, donate_argnums=0), (params, struct(mesh, (128, 64), 'data'))


def make_mesh(devices):
    return Mesh(np.reshape(devices, (4, 2)), ('data', 'model'))


def struct(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))


def added_up(program):
    """What a dumped program sends: (kind, axes) -> (bytes, executions)."""
    sums = {}
    for one in program.collectives:
        nbytes, count = sums.get((one.kind, one.axes), (0, 0))
        sums[one.kind, one.axes] = nbytes + one.total_bytes, count + one.count
    return sums
