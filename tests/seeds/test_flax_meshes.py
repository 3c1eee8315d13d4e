"""The rows B8 to B10 about flax.linen: the example in its docstring, and boxes inside a mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import KEY, XY, of_xy, partitioner_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import (
    LogicallyPartitioned,
    Partitioned,
    create_mesh,
    unbox,
    with_partitioning,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME
ON_BOTH = pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])


def mesh_of(axis_type, names=('x', 'y')):
    return create_mesh((4, 2), names, axis_types=axis_type)


# The example in the docstring of flax, with a stack of it.


class MLP(nn.Module):
    """The example in the docstring of flax.linen.Partitioned, for Auto and Explicit axes.

    Explicit axes require the layout of every product, which `dot_general` gives. Under Auto axes
    the layout is the same.
    """

    boxed_bias: bool = True
    hidden: int = 32

    @nn.compact
    def __call__(self, x, _=None):
        zeros = nn.initializers.zeros
        bias = with_partitioning(zeros, (None,)) if self.boxed_bias else zeros
        for size, names in ((self.hidden, ('data', 'model')), (x.shape[-1], ('model', 'data'))):
            kernel = with_partitioning(nn.initializers.lecun_normal(), names)
            x = nn.Dense(size, kernel_init=kernel, bias_init=bias, dot_general=gathered_product)(x)
            x = nn.relu(x) if names[0] == 'data' else x
        return x, None


def gathered_product(x, kernel, dimensions, precision=None, **_):
    """A product with rows over 'data' and columns over 'model'; the summed dimension is whole."""
    x = with_sharding_constraint(x, P('data', None))
    kernel = with_sharding_constraint(kernel, P(None, 'model'))
    return jax.lax.dot_general(x, kernel, dimensions, precision=precision)


X = np.asarray(jax.random.normal(jax.random.key(1), (8, 16)))
OF_MLP = {
    'Dense_0': {'bias': P(), 'kernel': P('data', 'model')},
    'Dense_1': {'bias': P(), 'kernel': P('model', 'data')},
}


def test_B8_layers_without_a_name():
    axes = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
    layers = nn.scan(MLP, **axes, length=8, metadata_params={N: None})
    bare = jax.eval_shape(layers(boxed_bias=False).init, KEY, X)
    assert nn.get_partition_spec(bare)['params'] == {
        dense: {'bias': P(), 'kernel': P(None, *of['kernel'])} for dense, of in OF_MLP.items()
    }
    born = partitioner_of().init(layers().init, KEY, X)['params']
    assert born['Dense_0']['kernel'].sharding.spec == P(None, 'data', 'model')
    assert born['Dense_1']['kernel'].shape == (8, 32, 16)
    assert born['Dense_1']['bias'].sharding.is_fully_replicated


# Boxes inside a mesh.


def test_B9_no_layout_without_a_mesh():
    for p in (of_xy(), of_xy(LogicallyPartitioned)):
        assert p.unbox() is p.value
    with jax.set_mesh(XY):
        p = of_xy()
        assert p.unbox(apply_constraint=False) is p.value


@ON_BOTH
def test_B9_inside_a_program(axis_type):
    """Over Explicit axes flax's boxes fail."""
    mesh, p = mesh_of(axis_type), of_xy()
    own = LogicallyPartitioned(p.value, ('a', 'b'), rules=(('a', 'x'), ('b', 'y')))
    with jax.set_mesh(mesh):
        for made in (p, own):
            laid_out = jax.jit(lambda made: made.unbox())(made)
            assert laid_out.sharding == NamedSharding(mesh, P('x', 'y'))
        if axis_type == AxisType.Explicit:
            with pytest.raises(AssertionError, match='acts as an assert'):
                jax.jit(nn.Partitioned.unbox)(nn.Partitioned(p.value, ('x', 'y')))


@ON_BOTH
def test_B9_outside_of_programs(axis_type):
    """The array moves from one device to the mesh; flax's boxes fail."""
    mesh, p = mesh_of(axis_type), of_xy()
    with jax.set_mesh(mesh):
        for laid_out in (p.unbox(), with_sharding_constraint(p.value, P('x', 'y'))):
            assert laid_out.sharding == NamedSharding(mesh, P('x', 'y'))
            assert {s.data.shape for s in laid_out.addressable_shards} == {(2, 2)}
        if axis_type == AxisType.Auto:
            with pytest.raises(TypeError, match='must be a `NamedSharding`'):
                nn.Partitioned(p.value, p.names).unbox()


@ON_BOTH
def test_B9_the_mesh_of_a_box(axis_type):
    mesh = mesh_of(axis_type)
    p = Partitioned(jnp.zeros((8, 4)), ('x', 'y'), mesh=mesh)
    assert p.unbox().sharding == NamedSharding(mesh, P('x', 'y'))  # no mesh is set
    with jax.set_mesh(mesh):
        assert jax.jit(lambda p: p.unbox())(p).sharding == NamedSharding(mesh, P('x', 'y'))
    with (
        jax.set_mesh(create_mesh((2, 4), ('x', 'y'))),
        pytest.raises(ValueError, match=r'x 4 x y 2.*x 2 x y 4'),
    ):
        jax.jit(lambda p: p.unbox())(p)


# The example in the docstring of flax.


def alone(params):
    """The output of the MLP on one device, without flax."""
    params = jax.device_get(unbox(params))
    first, second = params['Dense_0'], params['Dense_1']
    hidden = np.maximum(X @ first['kernel'] + first['bias'], 0)
    return hidden @ second['kernel'] + second['bias']


@ON_BOTH
def test_B10_the_example_by_hand(axis_type):
    """As users of flax write it: the specs of an abstract init are passed to jit."""
    mesh, mlp = mesh_of(axis_type, ('data', 'model')), MLP(boxed_bias=False)
    abstract = jax.eval_shape(mlp.init, KEY, X)
    assert nn.get_partition_spec(abstract) == {'params': OF_MLP}
    with jax.set_mesh(mesh):
        variables = jax.jit(mlp.init, out_shardings=nn.get_sharding(abstract, mesh))(KEY, X)
        kernel = variables['params']['Dense_0']['kernel'].value
        assert kernel.sharding == NamedSharding(mesh, P('data', 'model'))
        y, _ = jax.jit(mlp.apply)(variables, jax.device_put(X, NamedSharding(mesh, P('data'))))
    np.testing.assert_allclose(y, alone(variables['params']), rtol=1e-4, atol=1e-5)


@ON_BOTH
def test_B10_the_example_by_the_partitioner(axis_type):
    partitioner, mlp = partitioner_of(axis_types=axis_type), MLP()
    abstract = partitioner.eval_shape(mlp.init, KEY, X)
    axes = partitioner.get_mesh_axes(abstract)
    assert axes['params']['Dense_0']['kernel'] == P('data', 'model')
    assert axes['params']['Dense_1']['kernel'] == P('model', 'data')
    variables = partitioner.init(mlp.init, KEY, X)
    apply = partitioner.partition(mlp.apply, (axes, P('data', 'model')), (P('data', 'model'), None))
    y, _ = apply(variables, X)
    assert y.sharding == NamedSharding(partitioner.mesh, P('data', 'model'))
    np.testing.assert_allclose(y, alone(variables['params']), rtol=1e-4, atol=1e-5)
