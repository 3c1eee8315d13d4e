"""States of boxed arrays, and the specs they get on a mesh of data 4 x model 2."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from partitioning import PjitPartitioner

KEY = jax.random.key(0)
RULES = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), ('layers', None)]
ones = nn.initializers.ones


def partitioner_of(rules=(), **settings):
    return PjitPartitioner(2, logical_axis_rules=rules, **settings)


def of_one(array, rules, **settings):
    """The spec of a state with one array."""
    return partitioner_of(rules, **settings).get_mesh_axes({'params': {'w': array}})['params']['w']


def box(shape, *names, kind=nn.LogicallyPartitioned, **fields):
    return kind(jnp.zeros(shape), names, **fields)
