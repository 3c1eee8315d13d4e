"""Names through nn.scan and nn.vmap, and the spec of each array."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import KEY, RULES, box, of_one, ones, partitioner_of
from flax import errors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    get_logical_axes,
    unbox,
)
from partitioning.state.linen import with_logical_partitioning

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME
# Lifted layers.


class Layer(nn.Module):
    """One of a stack; `see` is told the names that its parameter has inside the lifted body."""

    initializer: object
    see: object

    @nn.compact
    def __call__(self, x, _=None):
        kernel = self.param('kernel', self.initializer, (6, 6))
        self.see(self.variables['params']['kernel'].names)
        return x @ kernel, None


def lifted(lift, init, see, axis=0, metadata=None, **more):
    metadata = {N: 'layers'} if metadata is None else metadata
    axes = {'variable_axes': {'params': axis}, 'split_rngs': {'params': True}}
    layers = lift(Layer, **axes, metadata_params=metadata, **more)
    return layers(init, see)


INITS = pytest.mark.parametrize(
    'boxes', [nn.with_logical_partitioning, with_logical_partitioning], ids=['flax', 'ours']
)
LIFTS = {'scan': (nn.scan, {'length': 3}), 'vmap': (nn.vmap, {'axis_size': 3, 'in_axes': None})}


@INITS
@pytest.mark.parametrize('lift', LIFTS)
@pytest.mark.parametrize(
    'axis, names, shape',
    [
        (0, ('layers', 'embed', 'mlp'), (3, 6, 6)),
        (1, ('embed', 'layers', 'mlp'), (6, 3, 6)),
        (2, ('embed', 'mlp', 'layers'), (6, 6, 3)),
    ],
)
def test_lifted_layers_have_one_name_more(boxes, lift, axis, names, shape):
    (transform, more), seen = LIFTS[lift], set()
    model = lifted(transform, boxes(ones, ('embed', 'mlp')), seen.add, axis, **more)
    variables = jax.eval_shape(model.init, KEY, jnp.ones((2, 6)))
    assert variables['params']['kernel'].value.shape == shape
    assert get_logical_axes(variables)['params']['kernel'] == AxisNames(*names)
    assert seen == {('embed', 'mlp')}
    sizes = {'layers': None, 'embed': 'data', 'mlp': 'model'}
    assert of_one(box((8, 8, 8), *names), RULES) == P(*(sizes[name] for name in names))


@pytest.mark.parametrize(
    'axis, names', [(-1, ('embed', 'mlp', 'layers')), (-3, ('layers', 'embed', 'mlp'))]
)
def test_our_box_counts_from_the_end_as_arrays_do(axis, names):
    """flax's puts 'layers' before 'mlp', which the array has not."""
    init = with_logical_partitioning(ones, ('embed', 'mlp'))
    model = lifted(nn.vmap, init, len, axis, axis_size=3, in_axes=None)
    kernel = jax.eval_shape(model.init, KEY, jnp.ones((2, 6)))['params']['kernel']
    assert kernel.names == names
    assert kernel.value.shape[kernel.names.index('layers')] == 3


@INITS
def test_lifted_layers_without_a_partition_name(boxes):
    init = boxes(ones, ('embed', 'mlp'))
    with pytest.raises(errors.PartitioningUnspecifiedError):
        lifted(nn.scan, init, len, metadata={'other': 1}, length=3).init(KEY, jnp.ones((2, 6)))


@INITS
def test_scanned_boxes_train(boxes):
    """Their names are taken off at the door of the body and put back behind it."""
    seen = set()
    init = boxes(nn.initializers.normal(), ('embed', 'mlp'))
    model = lifted(nn.scan, init, seen.add, length=3)
    variables = model.init(KEY, jnp.ones((2, 6)))
    (y, _), changed = model.apply(variables, jnp.ones((2, 6)), mutable=['params'])
    plain = unbox(variables)['params']['kernel']
    np.testing.assert_allclose(y, jnp.ones((2, 6)) @ plain[0] @ plain[1] @ plain[2], rtol=1e-5)
    assert changed['params']['kernel'].names == ('layers', 'embed', 'mlp')
    assert seen == {('embed', 'mlp')}


class TwoDense(nn.Module):
    boxed_bias: bool

    @nn.compact
    def __call__(self, x, _=None):
        zeros = nn.initializers.zeros
        bias = nn.with_partitioning(zeros, (None,)) if self.boxed_bias else zeros
        for names in (('data', 'model'), ('model', 'data')):
            kernel = nn.with_partitioning(ones, names)
            x = nn.Dense(8, kernel_init=kernel, bias_init=bias)(x)
        return x, None


def test_flax_example_is_born_as_it_says():
    """Scanned by nothing (None), so the new dimension is not sharded."""
    axes = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
    model = nn.scan(TwoDense, **axes, length=3, metadata_params={N: None})(boxed_bias=True)
    partitioner = partitioner_of([('batch', 'data')])
    params = partitioner.init(lambda key: model.init(key, jnp.ones((8, 8))), KEY)['params']
    specs = {
        'Dense_0': {'bias': P(None, None), 'kernel': P(None, 'data', 'model')},
        'Dense_1': {'bias': P(None, None), 'kernel': P(None, 'model', 'data')},
    }
    for dense, of_dense in specs.items():
        for name, spec in of_dense.items():
            array = params[dense][name]
            assert array.sharding.is_equivalent_to(
                NamedSharding(partitioner.mesh, spec), array.ndim
            )


def test_a_bias_without_a_box_is_asked_for():
    """flax replicates it without a word."""
    variables = jax.eval_shape(TwoDense(boxed_bias=False).init, KEY, jnp.ones((8, 8)))
    assert nn.get_partition_spec(variables)['params']['Dense_0']['bias'] == P()
    with pytest.raises(ValueError, match=r'params/Dense_0/bias.*\(None,\)'):
        partitioner_of().get_mesh_axes(variables)
