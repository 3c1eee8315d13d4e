"""A network over explicit axes, whose types say how every value is laid out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from placing import array, make_mesh

EMBED = 256


def explicit_axes() -> Any:
    """A feed-forward network over explicit axes, whose products say how they are laid out."""
    mesh = make_mesh(kind=AxisType.Explicit, data=4, model=2)

    rows, hidden_rows = (NamedSharding(mesh, P('data', axis)) for axis in (None, 'model'))

    @jax.jit
    def step(params, x):
        def loss(params):
            hidden = x
            for up, down in params:
                made = jax.nn.relu(jnp.einsum('be,eh->bh', hidden, up, out_sharding=hidden_rows))
                hidden = hidden + jnp.einsum('bh,he->be', made, down, out_sharding=rows)
            return jnp.mean(hidden.astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    half = {'dtype': jnp.bfloat16}
    layer = (
        array(mesh, (EMBED, 4 * EMBED), None, 'model', **half),
        array(mesh, (4 * EMBED, EMBED), 'model', None, **half),
    )
    return step, ([layer] * 3, array(mesh, (256, EMBED), 'data', None, **half))
