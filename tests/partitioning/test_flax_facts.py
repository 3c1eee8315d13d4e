"""What flax's boxes, params_axes and nnx variables say, as it holds through our library."""

import inspect
import json
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
from flax import errors, nnx
from flax.linen.partitioning import (
    get_axis_names,
    param_with_axes,
    scan_with_axes,
    variable_with_axes,
    vmap_with_axes,
)
from flax.linen.spmd import RulesFallback
from flax.nnx.training import optimizer as nnx_optimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import partitioning
from partitioning import (
    AxisNames,
    AxisRules,
    PjitPartitioner,
    TrainState,
    add_axis,
    constrain,
    create_mesh,
    get_logical_axes,
    remove_axis,
    unbox,
    with_sharding_constraint,
)
from partitioning.state.linen import LogicallyPartitioned, with_logical_partitioning

pytestmark = pytest.mark.core

UNC = P.UNCONSTRAINED
N = nn.PARTITION_NAME
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


# Names of boxes: those of mesh axes in Partitioned, logical ones in LogicallyPartitioned.


@pytest.mark.parametrize(
    'names, rules, expected',
    [
        (('data', 'model'), [], P('data', 'model')),
        ((None, 'model'), [], P(None, 'model')),
        ((('data', 'model'), None), [], P(('data', 'model'), None)),
        (('embed', 'model'), RULES, P('data', 'model')),
        (('data', 'embed'), RULES, P('data', None)),  # what is written out comes before rules
        (('data', 'mlp'), [('data', 'model'), ('mlp', 'data')], P('model', 'data')),
    ],
)
def test_names_of_partitioned(names, rules, expected):
    """A rule for a name is a rule; without one the name is a mesh axis."""
    array = box((8, 8), *names, kind=nn.Partitioned)
    assert of_one(array, rules) == expected
    if not rules:
        assert array.get_partition_spec() == expected


@pytest.mark.parametrize('kind', [nn.LogicallyPartitioned, LogicallyPartitioned])
def test_logical_names_are_no_mesh_axes(kind):
    with pytest.raises(ValueError, match="no rule for logical axis 'data'"):
        of_one(box((8, 8), 'data', 'mlp', kind=kind), RULES)


def test_shardings_of_a_tree_as_flax_gives_them():
    tree = {'a': box((8, 4), 'data', 'model', kind=nn.Partitioned), 'b': jnp.zeros(3), 'd': 1.0}
    partitioner = partitioner_of()
    ours, flax = partitioner.get_shardings(tree), nn.get_sharding(tree, partitioner.mesh)
    assert ours['a'] == flax['a']
    assert ours['b'].is_equivalent_to(flax['b'], 1)
    assert flax['d'] is None and ours['d'].is_equivalent_to(NamedSharding(ours['d'].mesh, P()), 0)


def test_names_of_a_tree_in_which_few_have_some():
    """flax gives P('layers', 'in', 'out'), P() and P(): only what has names has them."""
    tree = {
        'kernel': box((8, 3, 3), 'layers', 'in', 'out', kind=nn.Partitioned),
        'bias': jnp.zeros((8, 3)),
        'step': jnp.array(100),
    }
    assert nn.get_partition_spec(tree)['bias'] == P()
    names = get_logical_axes(tree)
    assert names['kernel'] == AxisNames('layers', 'in', 'out')
    assert names['bias'] == AxisNames(None, None)
    assert names['step'] == AxisNames()


def test_unbox_strips_boxes_in_boxes_and_around_trees():
    kernel, bias = jnp.zeros((3, 2)), jnp.zeros(3)
    inner = nn.Partitioned({'K': nn.Partitioned(kernel, ('data', None)), 'b': bias}, ('data',))
    out = unbox({'x': nn.LogicallyPartitioned(inner, ('embed',)), 'y': None})
    assert out['x']['K'] is kernel and out['x']['b'] is bias and out['y'] is None
    assert jax.tree.structure(out) == jax.tree.structure(nn.unbox({'x': inner, 'y': None}))


def test_of_boxes_in_boxes_the_outer_names():
    nested = nn.Partitioned(box((8, 8), 'data', 'model', kind=nn.Partitioned), ('model', 'data'))
    assert of_one(nested, []) == nested.get_partition_spec() == P('model', 'data')


def test_a_box_around_several_arrays_has_no_layout():
    several = nn.Partitioned({'K': jnp.zeros((8, 2)), 'b': jnp.zeros(8)}, ('data',))
    with pytest.raises(ValueError, match=r"params/w.*\('data',\) around several arrays"):
        of_one(several, [])


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_unbox_lays_out_nothing(axis_type):
    """flax's constrains: that fails on one device's array, and over Explicit axes."""
    array = box((8, 4), 'data', 'model', kind=nn.Partitioned)
    with jax.set_mesh(create_mesh((4, 2), ('data', 'model'), axis_types=axis_type)):
        assert unbox(array) is array.value
        with pytest.raises((TypeError, AssertionError, ValueError)):
            nn.unbox(array)
        assert jax.jit(unbox).trace(array).jaxpr.eqns == []


# Rules of an array's own, tried before the others.


@pytest.mark.parametrize(
    'names, own, expected',
    [
        (('in', 'mlp'), (('in', 'data'),), P('data', 'model')),
        (('embed', 'mlp'), (('mlp', None),), P('data', None)),
        (('embed', 'mlp'), (('mlp', 'data'),), P(None, 'data')),
        (('in', 'out'), (('in', ('data', 'model')), ('out', 'model')), P(('data', 'model'), None)),
    ],
)
@pytest.mark.parametrize('carrier', ['box', 'variable'])
def test_own_rules(names, own, expected, carrier):
    if carrier == 'box':
        array = box((8, 8), *names, rules=own)
    else:
        with nnx.use_eager_sharding(False):
            array = nnx.Param(jnp.zeros((8, 8)), out_sharding=names, sharding_rules=own)
    assert of_one(array, RULES) == expected
    assert nn.logical_to_mesh_axes(names, [*own, *RULES]) == expected


def test_own_rules_go_with_the_statistics():
    variables = {'params': {'w': box((8, 8), 'embed', 'mlp', rules=(('mlp', None),))}}
    axes = partitioner_of(RULES).get_mesh_axes(TrainState.create(variables, optax.adam(1e-3)))
    assert axes.opt_state[0].mu['w'] == axes.params['w'] == P('data', None)


@pytest.mark.parametrize(
    'own, message', [((('in', 'dta'),), "params/w.*'dta'.*mean 'data'"), ((('in', 5),), 'no rule')]
)
def test_own_rules_that_are_wrong(own, message):
    with pytest.raises(ValueError, match=message):
        of_one(box((8, 8), 'in', 'mlp', rules=own), RULES)


class OneArray(nn.Module):
    initializer: object
    shape: tuple = (8, 8)

    @nn.compact
    def __call__(self):
        return self.param('w', self.initializer, self.shape)


def test_names_mesh_and_rules_of_a_box_survive_jit():
    partitioner, rules = partitioner_of(RULES), (('a', 'data'), ('b', 'model'))
    init = nn.with_logical_partitioning(ones, ('a', 'b'), mesh=partitioner.mesh, rules=rules)
    made = partitioner.partition(OneArray(init).init, None, None).eval_shape(KEY)['params']['w']
    assert (made.names, made.rules) == (('a', 'b'), rules) and made.mesh is partitioner.mesh
    state = partitioner.init(OneArray(init).init, KEY)
    assert state['params']['w'].sharding == NamedSharding(partitioner.mesh, P('data', 'model'))


def test_a_box_for_another_mesh_is_an_error():
    """Its mesh cannot be honoured, so it is not ignored either."""
    other = create_mesh((2, 4), ('data', 'model'))
    with pytest.raises(ValueError, match=r'params/w.*mesh'):
        of_one(box((8, 8), 'data', 'model', kind=nn.Partitioned, mesh=other), [])


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


# add_axis and remove_axis.


@pytest.mark.parametrize(
    'index, expected',
    [
        (0, ('layers', 'x', 'y')),
        (1, ('x', 'layers', 'y')),
        (2, ('x', 'y', 'layers')),
        (4, ('x', 'y', None, None, 'layers')),
        (-1, ('x', 'y', 'layers')),
        (-2, ('x', 'layers', 'y')),
        (-3, ('layers', 'x', 'y')),
    ],
)
def test_add_axis(index, expected):
    """Of flax's table all but the negative indices, which are numpy's here."""
    added = add_axis(('x', 'y'), index, 'layers')
    assert added == AxisNames(*expected) and isinstance(added, AxisNames)
    assert add_axis(('x', 'y'), index, None) == tuple(
        None if name == 'layers' else name for name in expected
    )
    boxed = box((2, 2), 'x', 'y', kind=LogicallyPartitioned).add_axis(index, {N: 'layers'})
    assert boxed.names == expected
    if index >= 0:
        assert box((2, 2), 'x', 'y').add_axis(index, {N: 'layers'}).names == expected


NAMES = st.lists(st.sampled_from(['a', 'b', 'c', 'd', None]), max_size=4)


@settings(max_examples=200, deadline=None)
@given(NAMES, st.data())
def test_names_move_as_dimensions_do(names, data):
    """A dimension that numpy stacks by, and the dimension that it takes one of."""
    index = data.draw(st.integers(-len(names) - 1, len(names)))
    sizes = range(2, 2 + len(names))
    stacked = np.stack([np.zeros(tuple(sizes))] * 9, axis=index).shape
    expected = tuple('layers' if size == 9 else names[size - 2] for size in stacked)
    added = add_axis(names, index, 'layers')
    assert added == expected
    assert remove_axis(added, index, 'layers') == tuple(names)
    assert np.take(np.zeros(stacked), 0, axis=index).shape == tuple(sizes)


@settings(max_examples=100, deadline=None)
@given(NAMES.filter(bool), st.data())
def test_what_is_removed_can_be_added(names, data):
    """flax's contract, at every place from both ends."""
    index = data.draw(st.integers(-len(names), len(names) - 1))
    assert add_axis(remove_axis(names, index, names[index]), index, names[index]) == tuple(names)


def test_dimensions_in_between_stay():
    """The names cannot tell that they were not there before."""
    assert remove_axis(add_axis(('x', 'y'), 4, 'l'), 4, 'l') == AxisNames('x', 'y', None, None)


@pytest.mark.parametrize(
    'index, name, message',
    [
        (0, 'layers', "dimension 0 .*'x', not the 'layers'"),
        (-1, 'x', "dimension -1 .*'y', not the 'x'"),
        (2, 'x', 'no dimension 2'),
        (-3, 'x', 'no dimension -3'),
    ],
)
def test_removing_what_is_not_there(index, name, message):
    with pytest.raises(ValueError, match=message):
        remove_axis(('x', 'y'), index, name)
    with pytest.raises(ValueError, match=message):
        box((2, 2), 'x', 'y', kind=LogicallyPartitioned).remove_axis(index, {N: name})


def test_adding_before_the_first():
    with pytest.raises(ValueError, match='-4'):
        add_axis(('x', 'y'), -4, 'layers')


OPTIMIZED = """
import json, jax, flax.linen as nn, jax.numpy as jnp
from partitioning.state import linen

def names(boxes):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return x @ self.param('w', boxes(nn.initializers.ones, ('embed', 'mlp')), (4, 4)), None
    scanned = nn.scan(Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=3,
                      metadata_params={nn.PARTITION_NAME: 'layers'})()
    made = scanned.init(jax.random.key(0), jnp.ones((2, 4)))
    _, again = scanned.apply(made, jnp.ones((2, 4)), mutable=['params'])
    made, again = made['params']['w'], again['params']['w']
    return [made.names, made.remove_axis(0, {nn.PARTITION_NAME: 'layers'}).names, again.names]

try:
    linen.LogicallyPartitioned(0, ('x', 'y')).remove_axis(0, {nn.PARTITION_NAME: 'layers'})
    wrong = 'removed'
except ValueError as error:
    wrong = str(error)
found = [names(nn.with_logical_partitioning), names(linen.with_logical_partitioning), wrong]
print(json.dumps([__debug__, *found]))
"""


def test_without_asserts():
    """Under `python -O` flax's boxes remove nothing, and a name comes with every step."""
    root = Path(partitioning.__file__).parents[1]
    command = [sys.executable, '-O', '-c', OPTIMIZED]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    debug, flax, ours, wrong = json.loads(done.stdout)
    assert not debug
    layers, layer = ['layers', 'embed', 'mlp'], ['embed', 'mlp']
    assert flax == [layers, layers, ['layers', *layers]]
    assert ours == [layers, layer, layers]
    assert "not the 'layers'" in wrong


# Activations: mixed meshes, fallbacks, contexts.

MIXED = pytest.mark.parametrize(
    'axis_types', [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]
)
OF_ACTIVATIONS = [('batch', 'data'), ('embed', 'model'), ('both', ('data', 'model')), ('no', None)]


@MIXED
@pytest.mark.parametrize(
    'names, expected',
    [
        (('batch', 'embed'), P('data', 'model')),
        (('embed', 'batch'), P('model', 'data')),
        (('batch', None), P('data', None)),
        (('no', 'embed'), P(None, 'model')),
        (('no', None), P(None, None)),
    ],
)
def test_constrain_over_a_mixed_mesh(axis_types, names, expected):
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    x = np.arange(64.0, dtype='float32').reshape(8, 8)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, names, OF_ACTIVATIONS))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)
    np.testing.assert_array_equal(y, x * 2)


@MIXED
@pytest.mark.parametrize('axes', [('data', 'model'), ('model', 'data')])
def test_a_dimension_over_axes_of_both_types(axis_types, axes):
    """As it says, or an error: the order of the axes says which device has which rows."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    with jax.set_mesh(mesh):
        try:
            y = jax.jit(lambda x: with_sharding_constraint(x * 2, P(axes)))(jnp.ones((8, 8)))
        except ValueError:
            return
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(axes)), 2)


@MIXED
def test_unconstrained_dimensions_of_a_mixed_mesh(axis_types):
    """jax refuses them only where no axis is Auto."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, (UNC, 'embed'), OF_ACTIVATIONS))(jnp.ones((8, 8)))
    assert y.sharding.spec[1] == 'model'


def test_names_without_a_rule_as_fallbacks_of_linen():
    """RAISE_ERROR is ours unless a policy says AXIS_IS_UNSHARDED."""
    rules = [('foo', 'data')]
    mesh = create_mesh((4, 2), ('data', 'model'))
    x = np.ones((8, 8), np.float32)

    def ours(x):
        return constrain(x, ('foo', 'new'), AxisRules(rules, on_unmatched='replicate'))

    def linens(x, fallback=RulesFallback.AXIS_IS_UNSHARDED):
        return nn.with_logical_constraint(x, ('foo', 'new'), rules, fallback=fallback)

    with jax.set_mesh(mesh):
        for fn in (ours, linens):
            sharding = jax.jit(fn)(x).sharding
            assert sharding.is_equivalent_to(NamedSharding(mesh, P('data', None)), 2)
        with pytest.raises(ValueError, match='did not match a rule'):
            jax.jit(lambda x: linens(x, RulesFallback.RAISE_ERROR))(x)
        with pytest.raises(ValueError, match="no rule for logical axis 'new'"):
            jax.jit(lambda x: constrain(x, ('foo', 'new'), rules))(x)


def test_rules_of_a_partitioned_function_are_its_own():
    """Inside they are the partitioner's; before, after, and in other threads those that were."""
    partitioner, seen = partitioner_of(RULES), {}

    def look(x, fail=False):
        seen['inside'] = nn.get_logical_axis_rules()
        with nn.logical_axis_rules((('inner', None),)):
            seen['nested'] = nn.get_logical_axis_rules()
        thread = threading.Thread(target=lambda: seen.update(thread=nn.get_logical_axis_rules()))
        thread.start()
        thread.join()
        assert nn.get_logical_axis_rules() == seen['inside'] and not fail
        return x

    outside = (('outer', 'data'),)
    with nn.logical_axis_rules(outside):
        partitioner.partition(look, None, None)(jnp.ones(8))
        assert nn.get_logical_axis_rules() == outside
        with pytest.raises(AssertionError):
            partitioner.partition(lambda x: look(x, fail=True), None, None)(jnp.ones(8))
        assert nn.get_logical_axis_rules() == outside
    assert nn.get_logical_axis_rules() == ()
    expected = {'inside': tuple(RULES), 'nested': (('inner', None),), 'thread': ()}
    assert {k: tuple(v) for k, v in seen.items()} == expected


# Names beside the parameters.


class BesideLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        w1 = param_with_axes('W1', ones, (4, 6), axes=('emb', 'mlp'))
        w2 = param_with_axes('W2', ones, (6, 4), axes=('mlp', 'emb'))
        y = variable_with_axes('stats', 'y_st', jnp.zeros, (2, 4), axes=('batch', 'emb'))
        y.value = x @ w1 @ w2
        return y.value, None


def test_scan_with_axes():
    lift = {'variable_axes': {'params': 0, 'stats': 1}, 'split_rngs': {'params': True}}
    named = {'axis_name': 'layer', 'axes_collections': ('params', 'stats')}
    variables = scan_with_axes(BesideLayer, **lift, **named, in_axes=(), length=3)().init(
        KEY, jnp.ones((2, 4))
    )
    expected = {
        'params': {'W1': ('layer', 'emb', 'mlp'), 'W2': ('layer', 'mlp', 'emb')},
        'stats': {'y_st': ('batch', 'layer', 'emb')},
    }
    names = get_logical_axes(variables)
    for collection, of_collection in expected.items():
        flax = get_axis_names(variables[f'{collection}_axes'])
        for name, axes in of_collection.items():
            assert names[collection][name] == AxisNames(*axes)
            assert flax[name] == P(*axes)
    state = TrainState.create(variables, optax.adam(1e-3))
    rules = [('batch', 'model'), ('emb', 'data'), ('mlp', 'model'), ('layer', None)]
    axes = partitioner_of(rules).get_mesh_axes(state)
    assert axes.params == {'W1': P(None, 'data', 'model'), 'W2': P(None, 'model', 'data')}
    assert axes.opt_state[0].nu == axes.params
    assert axes.flax_mutables['stats']['y_st'] == P('model', None, 'data')


class BesideDense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ param_with_axes('w', ones, (4, 3), axes=('out', 'in')).T


def test_vmap_with_axes():
    lift = {'variable_axes': {'params': 1}, 'split_rngs': {'params': True}}
    many = vmap_with_axes(BesideDense, **lift, partitioning_axis_names={'params': 'vmap_axis'})
    variables = many().init(KEY, jnp.ones((2, 3)))
    assert variables['params']['w'].shape == (4, 2, 3)
    assert get_logical_axes(variables)['params']['w'] == AxisNames('out', 'vmap_axis', 'in')


# nnx.


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_nnx_variables_made_in_a_mesh(axis_type):
    partitioner = partitioner_of([('batch', 'data')], axis_types=axis_type)
    with jax.set_mesh(partitioner.mesh):
        metadata = {'out_sharding': (None, 'model')}
        model = nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(0), kernel_metadata=metadata)
    assert model.kernel.sharding.spec == P(None, 'model')
    assert partitioner.get_mesh_axes(nnx.state(model))['kernel'] == P(None, 'model')


@pytest.mark.parametrize('written', ['tuple', 'spec', 'sharding'])
def test_nnx_shardings_however_written(written):
    partitioner = partitioner_of()
    spec = P(None, ('data', 'model'))
    given = {
        'tuple': tuple(spec),
        'spec': spec,
        'sharding': NamedSharding(partitioner.mesh, spec),
    }[written]
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.zeros((8, 8)), out_sharding=given)
    assert partitioner.get_mesh_axes({'w': variable})['w'] == spec


def nnx_and_adam(metadata):
    def init(key):
        model = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(key), kernel_metadata=metadata)
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    return init


@pytest.mark.skipif(
    'optimizer_sharding' not in inspect.getsource(nnx_optimizer),
    reason='flax before 0.12.7 has no optimizer_sharding',
)
@pytest.mark.parametrize(
    'metadata',
    [
        {'out_sharding': (None, None), 'optimizer_sharding': ('row', 'col')},
        {'optimizer_sharding': ('row', 'col')},
    ],
    ids=['both', 'of the optimizer alone'],
)
@pytest.mark.parametrize('rules', [[], [('row', 'col'), ('col', 'row')]])
def test_nnx_sharding_of_the_optimizer(metadata, rules):
    """Parameters are replicated, statistics are not."""
    partitioner = PjitPartitioner(
        mesh=create_mesh((4, 2), ('row', 'col')), logical_axis_rules=rules
    )
    init, expected = nnx_and_adam(metadata), P('col', 'row') if rules else P('row', 'col')
    axes = partitioner.get_mesh_axes(partitioner.partition(init, None, None).eval_shape(KEY))
    assert set(axes[0]['kernel']) <= {None}
    statistics = axes[1]['opt_state'][0]
    assert statistics['mu']['kernel'] == expected
    state = partitioner.init(init, KEY)
    assert state[0]['kernel'].get_value().sharding.is_fully_replicated
    born = state[1]['opt_state'][0]['nu']['kernel'].get_value()
    assert born.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, expected), 2)
