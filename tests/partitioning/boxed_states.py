"""Boxed arrays, and the specs that they get on a mesh of data 4 x model 2."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import AxisMetadata
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import AxisNames, PaddedSpec, Partitioned, PjitPartitioner, create_mesh

KEY = jax.random.key(0)
RULES = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), ('layers', None)]
ones = nn.initializers.ones


def partitioner_of(rules=(), axis_types=AxisType.Auto):
    """A partitioner over data 4 x model 2."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    return PjitPartitioner(mesh=mesh, logical_axis_rules=rules)


def spec_of(array, rules):
    """The spec of `array` in a state that contains no other array."""
    return partitioner_of(rules).get_mesh_axes({'params': {'w': array}})['params']['w']


def box(shape, *names, kind=nn.LogicallyPartitioned, **fields):
    return kind(jnp.zeros(shape), names, **fields)


XY = create_mesh((4, 2), ('x', 'y'))


def of_xy(kind=Partitioned):
    """A box with the names of the axes of XY."""
    return kind(jnp.zeros((8, 4)), ('x', 'y'))


class OneArray(nn.Module):
    """A model with one parameter."""

    initializer: object

    @nn.compact
    def __call__(self):
        return self.param('w', self.initializer, (8, 8))


def by_path(tree):
    """The leaves of a tree by path. Specs and names are leaves."""
    is_leaf = lambda x: isinstance(x, P | PaddedSpec | AxisNames | AxisMetadata)  # noqa: E731
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return {jax.tree_util.keystr(p, simple=True, separator='/'): x for p, x in flat}


def abstract_box(shape, *names, kind=nn.LogicallyPartitioned, dtype=jnp.float32):
    """A box with an abstract array."""
    return kind(jax.ShapeDtypeStruct(shape, dtype), names)


def padded(outside, inside):
    return PaddedSpec(P(*outside), P(*inside))
