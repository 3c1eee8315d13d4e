"""Names of linen's boxes, as mesh axes or as logical axes, with rules and meshes of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import KEY, RULES, box, of_one, ones, partitioner_of
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    TrainState,
    create_mesh,
    get_logical_axes,
    unbox,
)
from partitioning.state.linen import LogicallyPartitioned

pytestmark = pytest.mark.core

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
