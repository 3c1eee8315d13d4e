"""A convolutional classifier with batch statistics over data, and an optimizer of optax."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

ROWS, SIDE, WIDTH, CLASSES, BLOCKS = 64, 16, 64, 256, 2


def build():
    mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

    def place(tree, spec):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
            tree,
        )

    optimizer = optax.adamw(1e-3)
    shapes = {
        'stem': jax.ShapeDtypeStruct((3, 3, 3, WIDTH), jnp.float32),
        'blocks': jax.ShapeDtypeStruct((BLOCKS, 3, 3, WIDTH, WIDTH), jnp.float32),
        'head': jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32),
    }
    specs = {'stem': P(), 'blocks': P(None, None, None, None, 'model'), 'head': P(None, 'model')}
    params = {name: place(shapes[name], specs[name]) for name in shapes}
    state = jax.eval_shape(optimizer.init, shapes)
    adam = state[0]._replace(
        count=place(state[0].count, P()),
        mu={name: place(shapes[name], specs[name]) for name in shapes},
        nu={name: place(shapes[name], specs[name]) for name in shapes},
    )
    state = (adam, *state[1:])
    images = place(jax.ShapeDtypeStruct((ROWS, SIDE, SIDE, 3), jnp.float32), P('data'))
    labels = place(jax.ShapeDtypeStruct((ROWS,), jnp.int32), P('data'))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel.astype(x.dtype), (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )

    def normalize(x):
        x = x.astype(jnp.float32)
        mean = jnp.mean(x, axis=(0, 1, 2))
        variance = jnp.mean((x - mean) ** 2, axis=(0, 1, 2))
        return ((x - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(jnp.bfloat16)

    def loss_of(params, images, labels):
        x = convolve(images.astype(jnp.bfloat16), params['stem'])
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data', None, None, 'model')))
        for kernel in params['blocks']:
            x = x + jax.nn.relu(normalize(convolve(x, kernel)))
            x = jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, P('data', None, None, 'model'))
            )
        pooled = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
        logits = pooled @ params['head']
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P('data', None)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def train_step(params, state, images, labels):
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    shardings = jax.tree.map(lambda a: a.sharding, (params, state))
    jitted = jax.jit(
        train_step,
        donate_argnums=(0, 1),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
    )
    return jitted, (params, state, images, labels)
