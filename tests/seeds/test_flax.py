"""What users of flax.linen.Partitioned and of logical axis rules know, by the rows B1 to B19."""

import inspect
import subprocess
import sys
import threading
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import KEY, box, ones, partitioner_of
from flax import errors, nnx
from flax.linen import partitioning as t5x
from flax.linen.spmd import RulesFallback
from flax.nnx.training import optimizer as nnx_optimizer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import partitioning
from partitioning import (
    AxisNames,
    AxisRules,
    LogicallyPartitioned,
    Partitioned,
    PjitPartitioner,
    constrain,
    create_mesh,
    get_logical_axes,
    global_mesh_defined,
    logical_to_mesh_axes,
    to_linen_boxes,
    to_nnx_state,
    to_params_axes,
    unbox,
    with_logical_partitioning,
    with_partitioning,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME
UNC = P.UNCONSTRAINED
XY = create_mesh((4, 2), ('x', 'y'))
BOTH = pytest.mark.parametrize('kind', [Partitioned, LogicallyPartitioned])
ON_BOTH = pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])


def of_xy(kind=Partitioned):
    return kind(jnp.zeros((8, 4)), ('x', 'y'))


def mesh_of(axis_type, names=('x', 'y')):
    return create_mesh((4, 2), names, axis_types=axis_type)


# A box.


@BOTH
def test_B1_a_box(kind):
    p = of_xy(kind)
    assert p.get_partition_spec() == P('x', 'y')
    assert len(jax.tree.leaves(p)) == 1
    assert jax.tree.map(jnp.shape, p) == kind((8, 4), ('x', 'y'))
    assert p.replace(names=('a',)).names == ('a',)
    again = p.replace_boxed(jnp.ones(3))
    assert type(again) is kind and (again.value.shape, again.names) == ((3,), ('x', 'y'))


def test_B1_its_sharding():
    assert of_xy().get_sharding(XY) == NamedSharding(XY, P('x', 'y'))
    own = LogicallyPartitioned(jnp.zeros((8, 4)), ('a', 'b'), rules=(('a', 'x'), ('b', 'y')))
    for array, rules in (
        (of_xy(), ()),
        (own, ()),
        (of_xy(LogicallyPartitioned), [*zip('xy', 'xy', strict=True)]),
    ):
        state = {'params': {'w': array}}
        found = PjitPartitioner(mesh=XY, logical_axis_rules=rules).get_shardings(state)
        assert found['params']['w'] == NamedSharding(XY, P('x', 'y'))


PLACES = {
    0: ('layers', 'x', 'y'),
    1: ('x', 'layers', 'y'),
    2: ('x', 'y', 'layers'),
    4: ('x', 'y', None, None, 'layers'),
}


@BOTH
def test_B2_add_axis(kind):
    for index, names in PLACES.items():
        added = of_xy(kind).add_axis(index, {N: 'layers'})
        assert type(added) is kind and added.names == names
    assert of_xy(kind).add_axis(0, {N: None}).names == (None, 'x', 'y')
    with pytest.raises(errors.PartitioningUnspecifiedError):
        of_xy(kind).add_axis(0, {})


@BOTH
def test_B2_a_negative_place_is_that_of_the_array(kind):
    """flax inserts as lists do, and names a dimension that the array does not get."""
    assert nn.Partitioned(0, ('x', 'y')).add_axis(-1, {N: 'layers'}).names == ('x', 'layers', 'y')
    assert of_xy(kind).add_axis(-1, {N: 'layers'}).names == ('x', 'y', 'layers')
    assert np.stack([np.zeros((8, 4))] * 3, axis=-1).shape == (8, 4, 3)


@BOTH
def test_B3_remove_axis(kind):
    def back(index, name='layers'):
        return of_xy(kind).add_axis(index, {N: 'layers'}).remove_axis(index, {N: name})

    for index in (0, 1, 2, -1, -2, -3):
        assert type(back(index)) is kind and back(index).names == ('x', 'y')
    assert back(4).names == ('x', 'y', None, None)  # names cannot tell that they were not there
    with pytest.raises(ValueError, match=r"dimension 1 .* is 'layers', not the 'other'"):
        back(1, 'other')
    with pytest.raises(ValueError, match='no dimension 2'):
        of_xy(kind).remove_axis(2, {N: 'layers'})
    with pytest.raises(errors.PartitioningUnspecifiedError):
        of_xy(kind).remove_axis(0, {})


OPTIMIZED = """
import flax.linen as nn
from partitioning import Partitioned
assert False, 'left out by -O'
for kind in (nn.Partitioned, Partitioned):
    print(kind(0, ('x', 'y')).remove_axis(0, {nn.PARTITION_NAME: 'x'}).names)
"""


def test_B3_under_python_O():
    done = subprocess.run(
        [sys.executable, '-O', '-c', OPTIMIZED],
        cwd=Path(partitioning.__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["('x', 'y')", "('y',)"]


# Trees of boxes.


def test_B4_specs_of_a_tree():
    tree = {'a': of_xy(), 'b': jnp.zeros(3), 'c': 'str', 'd': 1.0}
    assert nn.get_partition_spec(tree) == {'a': P('x', 'y'), 'b': P(), 'c': None, 'd': None}
    assert nn.get_sharding(tree, XY) == {
        **{'a': NamedSharding(XY, P('x', 'y')), 'b': NamedSharding(XY, P())},
        **{'c': None, 'd': None},
    }


def test_B4_specs_of_a_tree_here():
    """The same for arrays. What is none is whole everywhere, too: as a scalar of a state it is."""
    tree = {'a': of_xy(), 'b': jnp.zeros(3), 'c': 'str', 'd': 1.0, 'nothing': None}
    partitioner = PjitPartitioner(mesh=XY, logical_axis_rules=())
    assert partitioner.get_mesh_axes(tree) == {
        **{'a': P('x', 'y'), 'b': P(None), 'c': P(), 'd': P(), 'nothing': None},
    }
    ours = partitioner.get_shardings(tree)
    assert ours['a'] == NamedSharding(XY, P('x', 'y'))
    assert ours['b'].is_equivalent_to(NamedSharding(XY, P()), 1)
    assert ours['c'] == ours['d'] == NamedSharding(XY, P()) and ours['nothing'] is None


def test_B5_few_of_a_tree_have_names():
    kernel = Partitioned(jnp.zeros((8, 3, 3)), ('layers', 'in', 'out'))
    tree = {'kernel': kernel, 'bias': jnp.zeros((8, 3)), 'step': jnp.array(100)}
    specs = {'kernel': P('layers', 'in', 'out'), 'bias': P(), 'step': P()}
    assert nn.get_partition_spec(tree) == specs
    assert get_logical_axes(tree) == {
        'kernel': AxisNames('layers', 'in', 'out'),
        'bias': AxisNames(None, None),
        'step': AxisNames(),
    }
    mesh = create_mesh((8, 1, 1), ('layers', 'in', 'out'))
    ours = PjitPartitioner(mesh=mesh, logical_axis_rules=()).get_mesh_axes(tree)
    assert ours == {**specs, 'bias': P(None, None)}
    rules = [('layers', 'x'), ('in', None), ('out', None)]
    ours = PjitPartitioner(mesh=XY, logical_axis_rules=rules).get_mesh_axes(
        {**tree, 'kernel': LogicallyPartitioned(kernel.value, kernel.names)}
    )
    assert ours == {'kernel': P('x', None, None), 'bias': P(None, None), 'step': P()}


@pytest.mark.parametrize('strip', [unbox, nn.unbox])
def test_B6_unbox_strips_boxes_in_boxes(strip):
    arrays = {'K': jnp.zeros((3, 2)), 'b': jnp.zeros(3)}
    out = strip(Partitioned(arrays, ('data',)))
    assert out['K'] is arrays['K'] and out['b'] is arrays['b']
    value = jnp.zeros((8, 4))
    assert strip(Partitioned(Partitioned(value, ('x', 'y')), ('x', 'y'))) is value


# Lifted layers.


class Bar(nn.Module):
    see: object
    shape: tuple = (3, 3)

    @nn.compact
    def __call__(self, x, _=None):
        kernel = self.param('kernel', with_partitioning(ones, ('in', 'out')), self.shape)
        bias = self.param('bias', nn.initializers.zeros, self.shape[-1:])
        self.see(self.variables['params']['kernel'].names)
        return x @ kernel + bias, None


def lifted(lift, metadata, see=len, **more):
    axes = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
    return lift(Bar, **axes, metadata_params=metadata, **more)(see)


def test_B7_vmap():
    seen = set()
    made = lifted(nn.vmap, {N: 'batch'}, seen.add).init(KEY, jnp.ones((8, 3)))['params']
    assert made['kernel'].names == ('batch', 'in', 'out')
    assert made['kernel'].value.shape == (8, 3, 3)
    assert seen == {('in', 'out')}
    with pytest.raises(errors.PartitioningUnspecifiedError):
        lifted(nn.vmap, {}).init(KEY, jnp.ones((8, 3)))


def test_B8_scan():
    made = lifted(nn.scan, {N: 'layers'}, length=8).init(KEY, jnp.ones((2, 3)))['params']
    assert jax.tree.map(jnp.shape, made) == {
        'kernel': Partitioned((8, 3, 3), ('layers', 'in', 'out')),
        'bias': (8, 3),
    }


class MLP(nn.Module):
    """The example in the docstring of flax.linen.Partitioned, as it is written now.

    Under Explicit axes a product must be told what is gathered: `dot_general` says it, and under
    Auto axes it is the same layout.
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
    """Rows over 'data', columns over 'model', what is summed over whole."""
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


# What a box does inside a mesh.


def test_B9_no_mesh_no_layout():
    for p in (of_xy(), of_xy(LogicallyPartitioned)):
        assert p.unbox() is p.value
    with jax.set_mesh(XY):
        p = of_xy()
        assert p.unbox(apply_constraint=False) is p.value


@ON_BOTH
def test_B9_inside_a_program(axis_type):
    """Over Explicit axes flax's own boxes fail."""
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
    """Moved there, from one device; flax's own boxes fail."""
    mesh, p = mesh_of(axis_type), of_xy()
    with jax.set_mesh(mesh):
        for laid_out in (p.unbox(), with_sharding_constraint(p.value, P('x', 'y'))):
            assert laid_out.sharding == NamedSharding(mesh, P('x', 'y'))
            assert {s.data.shape for s in laid_out.addressable_shards} == {(2, 2)}
        if axis_type == AxisType.Auto:
            with pytest.raises(TypeError, match='must be a `NamedSharding`'):
                nn.Partitioned(p.value, p.names).unbox()


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_B9_the_mesh_context_of_old_is_none():
    """Under `with mesh:` flax's boxes constrain nothing, in silence: for them there is no mesh."""
    with XY:
        laid_out = jax.jit(nn.Partitioned.unbox)(nn.Partitioned(jnp.zeros((8, 4)), ('x', 'y')))
        assert not global_mesh_defined()
    assert len(laid_out.sharding.device_set) == 1


@pytest.mark.parametrize(
    'types', [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]
)
def test_B9_axes_of_both_types(types):
    mesh = create_mesh((4, 2), ('x', 'y'), axis_types=types)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda p: p.unbox())(of_xy())
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('x', 'y')), 2)
        y = jax.jit(lambda y: constrain(y, ('a', None), [('a', 'x')]))(y)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('x')), 2)


@ON_BOTH
def test_B9_a_mesh_of_its_own(axis_type):
    mesh = mesh_of(axis_type)
    p = Partitioned(jnp.zeros((8, 4)), ('x', 'y'), mesh=mesh)
    assert p.unbox().sharding == NamedSharding(mesh, P('x', 'y'))  # and around it there is none
    with jax.set_mesh(mesh):
        assert jax.jit(lambda p: p.unbox())(p).sharding == NamedSharding(mesh, P('x', 'y'))
    with (
        jax.set_mesh(create_mesh((2, 4), ('x', 'y'))),
        pytest.raises(ValueError, match=r'x 4 x y 2.*x 2 x y 4'),
    ):
        jax.jit(lambda p: p.unbox())(p)


@ON_BOTH
def test_B9_constrain_goes_by_the_mesh(axis_type):
    x = jnp.zeros((8, 4))
    rules = [('rows', 'x'), ('columns', 'y')]
    assert constrain(x, ('rows', 'columns'), rules) is x
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, ('rows', 'columns'), rules))(x)
    assert y.sharding == NamedSharding(mesh, P('x', 'y'))


# The example of the docstring.


def alone(params):
    """The MLP on one device, without flax."""
    params = jax.device_get(unbox(params))
    first, second = params['Dense_0'], params['Dense_1']
    hidden = np.maximum(X @ first['kernel'] + first['bias'], 0)
    return hidden @ second['kernel'] + second['bias']


@ON_BOTH
def test_B10_the_example_by_hand(axis_type):
    """As its users write it: specs of an abstract init, then jit with them."""
    mesh, mlp = mesh_of(axis_type, ('data', 'model')), MLP(boxed_bias=False)
    abstract = jax.eval_shape(mlp.init, KEY, X)
    assert nn.get_partition_spec(abstract) == {'params': OF_MLP}
    with jax.set_mesh(mesh):
        variables = jax.jit(mlp.init, out_shardings=nn.get_sharding(abstract, mesh))(KEY, X)
        kernel = variables['params']['Dense_0']['kernel'].value
        assert kernel.sharding == NamedSharding(mesh, P('data', 'model'))
        y, _ = jax.jit(mlp.apply)(variables, jax.device_put(X, NamedSharding(mesh, P('data'))))
    np.testing.assert_allclose(y, alone(variables['params']), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_B10_the_example_as_it_was_written():
    """`mesh(pjit(init))` shards nothing: each device that it uses holds all of the kernel.

    Over Explicit axes, jax's default, flax's own boxes fail, and those of here do not.
    """
    from jax.experimental.pjit import pjit  # deprecated, and says so where it is imported

    kernel = nn.with_partitioning(ones, ('data', 'model'))
    mesh = create_mesh((4, 2), ('data', 'model'))
    for jit in (pjit, jax.jit):
        made = mesh(jit(OneArray(kernel).init))(KEY)['params']['w'].value
        assert made.sharding.shard_shape((8, 8)) == (8, 8)
    with jax.set_mesh(mesh):
        sharding = nn.get_sharding(jax.eval_shape(OneArray(kernel).init, KEY), mesh)
        made = jax.jit(OneArray(kernel).init, out_shardings=sharding)(KEY)['params']['w'].value
    assert made.sharding.shard_shape((8, 8)) == (2, 4)
    ours = with_partitioning(ones, ('data', 'model'))
    with jax.set_mesh(jax.make_mesh((4, 2), ('data', 'model'), (AxisType.Explicit,) * 2)):
        with pytest.raises(AssertionError, match='acts as an assert'):
            jax.jit(lambda: kernel(KEY, (8, 4)).unbox())()
        assert jax.jit(lambda: ours(KEY, (8, 4)).unbox())().sharding.spec == P('data', 'model')


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


# Rules: each table for a box, for T5X's params_axes and for an nnx variable.

CUBE = create_mesh((2, 2, 2), ('data', 'model', 'replica'))
CUBE_XYZ = create_mesh((2, 2, 2), ('X', 'Y', 'Z'))


def boundary_spec(names, rules, mesh=CUBE):
    """The spec that an array with these names gets, whatever carries them."""
    linen = {'params': {'w': box((8,) * len(names), *names)}}
    rules = AxisRules(rules, on_unmatched='replicate')
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    by_box = partitioner.get_mesh_axes(linen)['params']['w']
    by_axes = partitioner.get_mesh_axes(to_params_axes(linen))['params']['w']
    by_variable = partitioner.get_mesh_axes(to_nnx_state(linen))['w']
    assert by_box == by_axes == by_variable == logical_to_mesh_axes(names, rules)
    return tuple(by_box)


R = [('head', 'model'), ('embed', 'model'), ('embed', 'data'), ('vocab', 'model')]
XYZ = [('batch', 'X'), ('features', 'X'), ('heads', 'Y'), ('batch', 'Z')]


def test_B11_the_first_rule_wins_and_an_axis_is_used_once():
    assert boundary_spec(('embed', 'head'), R) == ('data', 'model')
    assert boundary_spec(('vocab', 'embed'), R) == (None, 'model')
    names = ('batch', 'length', 'heads', 'features')
    assert boundary_spec(names, XYZ, CUBE_XYZ) == ('X', None, 'Y', None)


@pytest.mark.parametrize(
    'rules, names, expected',
    [
        ([('a', ('model', 'data')), ('b', 'data')], 'ab', (('model', 'data'), None)),
        ([('a', ('model', 'replica')), ('b', 'data')], 'ab', (('model', 'replica'), 'data')),
        (
            [('a', ('model', 'replica')), ('b', ('data', 'model'))],
            'ab',
            (('model', 'replica'), None),
        ),
        ([('a', ('model', 'replica')), ('b', 'model')], 'abc', (('model', 'replica'), None, None)),
        ([], 'abc', (None, None, None)),
        ([('a', None), ('a', 'model')], 'ab', (None, None)),
        (
            [('z', 'data'), ('r', None), ('f', 'model'), ('f', 'data')],
            'zrf',
            ('data', None, 'model'),
        ),
    ],
)
def test_B12_table(rules, names, expected):
    assert boundary_spec(tuple(names), rules) == expected


PRIORITIES = [('foo', 'model'), ('bar', 'model'), ('baz', 'data')]


@pytest.mark.parametrize(
    'names, expected',
    [
        (('foo', 'bar', 'baz'), ('model', None, 'data')),
        (('bar', 'foo', 'baz'), (None, 'model', 'data')),
        (('baz', 'bar', 'foo', 'unassigned'), ('data', None, 'model', None)),
    ],
)
def test_B13_priorities(names, expected):
    assert boundary_spec(names, PRIORITIES) == expected


def test_B13_unconstrained_dimensions():
    names, rules = ('foo', UNC, UNC, None, None), [('foo', 'data'), ('bar', 'model')]
    assert tuple(logical_to_mesh_axes(names, rules)) == ('data', UNC, UNC, None, None)


def test_B14_what_is_wrong():
    with pytest.raises(ValueError, match=r"'foo'.*two dimensions.*\('foo', 'foo', 'baz'\)"):
        boundary_spec(('foo', 'foo', 'baz'), PRIORITIES)
    assert logical_to_mesh_axes(None, PRIORITIES) is None
    with pytest.raises(ValueError, match='must be a list or a tuple of pairs, not generator'):
        logical_to_mesh_axes(('foo',), (rule for rule in PRIORITIES))
    with pytest.raises(ValueError, match=r"'zz'.*data 2 x model 2 x replica 2"):
        boundary_spec(('foo',), [('foo', 'zz')])


# Activations.


def constrained(names, rules):
    """The spec that `constrain` gives inside a program, and whether it does anything."""
    mesh = create_mesh((4, 2), ('data', 'model'))
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda x: constrain(x, names, rules)).trace(jnp.zeros((8, 4)))
        y = jax.jit(lambda x: constrain(x, names, rules))(jnp.zeros((8, 4)))
    return y.sharding.spec, len(traced.jaxpr.eqns)


def test_B15_a_name_without_a_rule():
    """AXIS_IS_UNSHARDED is a policy, RAISE_ERROR is what happens without one."""
    rules = [('foo', 'data')]
    spec, _ = constrained(('foo', 'bar'), AxisRules(rules, on_unmatched='replicate'))
    assert (*spec, None)[:2] == ('data', None)
    with pytest.raises(ValueError, match=r"no rule for logical axis 'bar'.*\('bar', None\)"):
        constrained(('foo', 'bar'), rules)


def test_B15_no_constraint():
    """NO_CONSTRAINT in silence is flax's alone; a dimension that is left open says so."""
    rules = [('foo', 'data')]

    def flax(x):
        fallback = RulesFallback.NO_CONSTRAINT
        return nn.with_logical_constraint(x, ('foo', 'bar'), rules, fallback=fallback)

    with jax.set_mesh(create_mesh((4, 2), ('data', 'model'))):
        assert not jax.jit(flax).trace(jnp.zeros((8, 4))).jaxpr.eqns
    assert constrained((UNC, UNC), rules)[1] == 1
    with jax.set_mesh(XY), pytest.raises(ValueError, match='no logical axis rules'):
        constrain(jnp.zeros((8, 4)), ('foo', 'bar'), [])
    with pytest.raises(ValueError, match='its names'):
        constrain(jnp.zeros((8, 4)), None, rules)


def test_B16_rules_of_the_context():
    outer, inner = (('a', 'data'),), (('a', 'model'),)
    mesh, x, elsewhere = create_mesh((4, 2), ('data', 'model')), jnp.zeros((8, 4)), []

    def layout():
        with jax.set_mesh(mesh):
            return jax.jit(lambda x: constrain(x, ('a', None)))(x).sharding.spec[0]

    assert nn.get_logical_axis_rules() == ()
    with nn.logical_axis_rules(outer):
        assert layout() == 'data'
        with nn.logical_axis_rules(inner):
            assert layout() == 'model'
            thread = threading.Thread(target=lambda: elsewhere.append(nn.get_logical_axis_rules()))
            thread.start()
            thread.join()
        assert layout() == 'data'
    assert nn.get_logical_axis_rules() == () and elsewhere == [()]
    with pytest.raises(ValueError, match='no logical axis rules are'):
        layout()


def test_B16_a_partitioned_function_sets_them():
    partitioner, seen = partitioner_of([('a', 'data')]), []

    def program(x):
        seen.append(nn.get_logical_axis_rules())
        return constrain(x, ('a', None))

    y = partitioner.partition(program, None, P('data', None))(jnp.zeros((8, 4)))
    assert y.sharding.spec[0] == 'data' and list(seen[0]) == [('a', 'data')]
    assert nn.get_logical_axis_rules() == ()


class OneArray(nn.Module):
    initializer: object

    @nn.compact
    def __call__(self):
        return self.param('w', self.initializer, (8, 8))


def test_B17_names_mesh_and_rules_survive_jit():
    mesh, rules = create_mesh((4, 2), ('in', 'out')), (('a', 'in'), ('b', 'out'))
    init = with_logical_partitioning(ones, ('a', 'b'), mesh=mesh, rules=rules)
    made = jax.jit(OneArray(init).init)(KEY)['params']['w']
    assert type(made) is LogicallyPartitioned and made.mesh is mesh
    assert (made.names, made.rules) == (('a', 'b'), rules)
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=())
    born = partitioner.init(OneArray(init).init, KEY)['params']['w']
    assert born.sharding == NamedSharding(mesh, P('in', 'out'))


@pytest.mark.parametrize('boxes', [with_partitioning, with_logical_partitioning])
def test_B17_names_that_are_none(boxes):
    with pytest.raises(ValueError, match=r"write a tuple, such as \('embed',\)"):
        boxes(ones, 'embed')
    with pytest.raises(ValueError, match='is no rule'):
        with_logical_partitioning(ones, ('a',), rules=[('a', 5)])


# T5X's names beside the arrays.


class Beside(nn.Module):
    @nn.compact
    def __call__(self, x):
        w1 = t5x.param_with_axes('W1', ones, (4, 6), axes=('emb', 'mlp'))
        w2 = t5x.param_with_axes('W2', ones, (6, 4), axes=('mlp', 'emb'))
        y = t5x.variable_with_axes('stats', 'y_st', jnp.zeros, (2, 4), axes=('batch', 'emb'))
        y.value = x @ w1 @ w2
        return y.value, None


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ t5x.param_with_axes('w', ones, (4, 3), axes=('out', 'in')).T


def test_B18_names_beside():
    class Foo(nn.Module):
        @nn.compact
        def __call__(self):
            return t5x.param_with_axes('foo', ones, (2, 3), axes=('foo', 'bar'))

    made = Foo().init(KEY)
    names = made['params_axes']['foo_axes']
    assert type(names) is t5x.AxisMetadata and tuple(names.names) == ('foo', 'bar')
    assert t5x.get_axis_names(made['params_axes']) == {'foo': P('foo', 'bar')}
    assert get_logical_axes(made)['params']['foo'] == AxisNames('foo', 'bar')
    assert to_linen_boxes(made)['params']['foo'].names == ('foo', 'bar')


def test_B18_scan_with_axes():
    lift = {'variable_axes': {'params': 0, 'stats': 1}, 'split_rngs': {'params': True}}
    named = {'axis_name': 'layer', 'axes_collections': ('params', 'stats')}
    scanned = t5x.scan_with_axes(Beside, **lift, **named, in_axes=(), length=3)()
    names = get_logical_axes(scanned.init(KEY, jnp.ones((2, 4))))
    assert names['params']['W1'] == AxisNames('layer', 'emb', 'mlp')
    assert names['params']['W2'] == AxisNames('layer', 'mlp', 'emb')
    assert names['stats']['y_st'] == AxisNames('batch', 'layer', 'emb')


def test_B18_vmap_with_axes():
    lift = {'variable_axes': {'params': 1}, 'split_rngs': {'params': True}}
    many = t5x.vmap_with_axes(Dense, **lift, partitioning_axis_names={'params': 'vmap_axis'})
    made = many().init(KEY, jnp.ones((2, 3)))
    assert made['params']['w'].shape == (4, 2, 3)
    assert get_logical_axes(made)['params']['w'] == AxisNames('out', 'vmap_axis', 'in')


# nnx.


def linear(**metadata):
    named = {'out_sharding': (None, 'model'), **metadata}
    return nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(0), kernel_metadata=named)


@ON_BOTH
def test_B19_variables_in_a_mesh(axis_type):
    partitioner = partitioner_of(axis_types=axis_type)
    with jax.set_mesh(partitioner.mesh):
        made = linear()
    assert made.kernel.sharding.spec == P(None, 'model')
    assert partitioner.get_mesh_axes(nnx.state(made))['kernel'] == P(None, 'model')


def test_B19_without_a_mesh():
    """flax refuses; in `init` and `eval_shape` of a partitioner there is one."""
    with pytest.raises(ValueError, match='An auto mesh context or metadata is required'):
        linear()
    born = partitioner_of().init(lambda: nnx.state(linear()))
    assert born['kernel'].sharding.spec == P(None, 'model')


@pytest.mark.skipif(
    'optimizer_sharding' not in inspect.getsource(nnx_optimizer),
    reason='flax before 0.12.7 has no optimizer_sharding',
)
def test_B19_the_optimizer_has_a_layout_of_its_own():
    metadata = {'out_sharding': None, 'optimizer_sharding': ('data', 'model')}
    partitioner = partitioner_of()

    def init():
        model = linear(**metadata)
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    axes = partitioner.get_mesh_axes(partitioner.eval_shape(init))
    model, optimizer = axes[0], axes[1]
    assert tuple(model['kernel']) in ((), (None, None))
    assert optimizer['opt_state'][0]['mu']['kernel'] == P('data', 'model')
