"""Conversions between linen boxes, nnx variables and T5X's params_axes, and back."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import KEY, RULES, box
from flax import nnx, struct
from flax.core import freeze
from flax.linen import partitioning as t5x

from partitioning import (
    LogicallyPartitioned,
    Partitioned,
    create_mesh,
    get_logical_axes,
    to_linen_boxes,
    to_nnx_state,
    to_params_axes,
    unbox,
)

pytestmark = pytest.mark.core

MESH = create_mesh((4, 2), ('data', 'model'))


def is_box(x):
    return hasattr(x, 'unbox')


def boxes(tree):
    """Each array of a tree of boxes with everything that its box holds."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return {
        jax.tree_util.keystr(path): (
            (type(x), x.names, x.mesh, getattr(x, 'rules', None), id(x.value))
            if is_box(x)
            else (None, id(x))
        )
        for path, x in flat
    }


def variables(state):
    """Each variable of a state with its type, names and array."""
    return {
        path: (type(v), v.get_metadata('out_sharding', None), id(v.get_value()))
        for path, v in nnx.to_flat_state(state)
    }


BOXES = {
    'params': {
        'Dense_0': {
            'kernel': box((8, 4), 'embed', 'mlp'),
            'bias': box((4,), 'mlp', rules=(('mlp', None),)),
        },
        'Dense_1': {'kernel': box((4, 8), 'model', 'data', kind=nn.Partitioned, mesh=MESH)},
        'ours': {
            'kernel': box((8, 4), 'embed', 'mlp', kind=LogicallyPartitioned, rules=tuple(RULES)),
            'wide': box((8, 4), ('data', 'model'), None, kind=Partitioned),
        },
        'unnamed': jnp.zeros(3),
    },
    'batch_stats': {'norm': {'mean': box((4,), 'mlp'), 'var': jnp.ones(4)}},
}


def test_boxes_to_variables_and_back():
    state = to_nnx_state(BOXES)
    assert to_nnx_state(state) is state
    assert boxes(to_linen_boxes(state)) == boxes(BOXES)
    assert boxes(to_linen_boxes(BOXES)) == boxes(BOXES)
    assert boxes(to_linen_boxes(to_nnx_state(freeze(BOXES)))) == boxes(BOXES)


def test_metadata_of_converted_variables():
    state = to_nnx_state(BOXES)
    kernel, bias = state['Dense_0']['kernel'], state['Dense_0']['bias']
    assert type(kernel) is nnx.Param and type(state['norm']['mean']) is nnx.BatchStat
    assert kernel.get_value() is BOXES['params']['Dense_0']['kernel'].value
    assert kernel.get_metadata()['out_sharding'] == ('embed', 'mlp')
    assert bias.get_metadata()['sharding_rules'] == (('mlp', None),)
    assert state['Dense_1']['kernel'].get_metadata()['mesh'] is MESH
    assert 'out_sharding' not in state['unnamed'].get_metadata()


class Block(nnx.Module):
    def __init__(self, rngs):
        def names(*names):
            return {'out_sharding': names}

        self.layers = nnx.List(
            nnx.Linear(8, 8, rngs=rngs, kernel_metadata=names('embed', axis)) for axis in 'xy'
        )
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        own = {'sharding_rules': (('embed', 'data'),), 'mesh': MESH}
        self.head = nnx.Linear(8, 4, rngs=rngs, kernel_metadata={**names('embed', None), **own})


def block_state():
    with nnx.use_eager_sharding(False):
        return nnx.state(Block(nnx.Rngs(0)), (nnx.Param, nnx.BatchStat))


def test_variables_to_boxes_and_back():
    state = block_state()
    linen = to_linen_boxes(state)
    assert variables(to_nnx_state(linen)) == variables(state)
    assert boxes(to_linen_boxes(to_nnx_state(linen))) == boxes(linen)


def test_fields_of_converted_boxes():
    linen = to_linen_boxes(block_state())
    assert {*linen} == {'params', 'batch_stats'}
    kernel = linen['params']['layers'][1]['kernel']  # keys of lists stay integers
    assert type(kernel) is Partitioned and kernel.names == ('embed', 'y')
    head = linen['params']['head']['kernel']
    assert type(head) is LogicallyPartitioned
    assert (head.rules, head.mesh) == ((('embed', 'data'),), MESH)
    assert not is_box(linen['batch_stats']['norm']['mean'])


class T5xModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        up = t5x.param_with_axes('kernel', init, (8, 4), jnp.float32, axes=('embed', 'mlp'))
        t5x.variable_with_axes('batch_stats', 'mean', jnp.zeros, (4,), axes=('mlp',))
        return x @ up


def test_params_axes_to_boxes_and_back():
    made = T5xModel().init(KEY, jnp.ones((2, 8)))
    linen = to_linen_boxes(made)
    kernel = linen['params']['kernel']
    assert type(kernel) is LogicallyPartitioned and kernel.names == ('embed', 'mlp')
    assert kernel.value is made['params']['kernel']
    assert linen['batch_stats']['mean'].names == ('mlp',)
    again = to_params_axes(linen)
    assert get_logical_axes(again) == get_logical_axes(made)
    assert jax.tree.structure(again) == jax.tree.structure(dict(made))
    names = again['params_axes']['kernel_axes']
    assert type(names) is t5x.AxisMetadata and tuple(names.names) == ('embed', 'mlp')
    through_nnx = to_params_axes(to_nnx_state(made))
    assert jax.tree.structure(through_nnx) == jax.tree.structure(again)


def test_a_linen_model_becomes_an_nnx_model():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
            return nn.Dense(4, kernel_init=init, name='up')(x)

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    x = jax.random.normal(KEY, (2, 8))
    made, model = Linen().init(KEY, x), Nnx(nnx.Rngs(1))
    nnx.update(model, to_nnx_state(made))
    np.testing.assert_array_equal(model(x), Linen().apply(unbox(made), x))
    assert model.up.kernel.get_metadata()['out_sharding'] == ('embed', 'mlp')


# Arrays and trees that cannot be converted.


class Tagged(nn.Partitioned):
    tag: str = struct.field(default='mine', pytree_node=False)


def variable(**metadata):
    with nnx.use_eager_sharding(False):
        return nnx.State({'w': nnx.Param(jnp.zeros((8, 4)), **metadata)})


def nested():
    return box((8, 4), 'embed', 'mlp').replace_boxed(box((8, 4), 'embed', 'mlp'))


@pytest.mark.parametrize(
    'convert, tree, message',
    [
        (to_nnx_state, lambda: {'params': {'w': nested()}}, 'params/w is a box inside a box'),
        (
            to_nnx_state,
            lambda: {'params': {'w': nn.Partitioned({'k': jnp.zeros(3)}, ('data',))}},
            'params/w.*several arrays',
        ),
        (
            to_nnx_state,
            lambda: {'params': {'w': Tagged(jnp.zeros(3), ('data',))}},
            'params/w has tag, .*remove',
        ),
        (
            to_nnx_state,
            lambda: {'params': {'w': jnp.zeros(3)}, 'cache': {'w': jnp.zeros(3)}},
            'cache/w and params/w have the same path',
        ),
        (
            to_nnx_state,
            lambda: {'params': {'w': jnp.zeros(3)}, 'cache': {'w': {'k': jnp.zeros(3)}}},
            'cache/w/k and params/w have the same path',
        ),
        (to_nnx_state, lambda: {'params': box((3,), 'mlp')}, 'params and its collection'),
        (
            to_nnx_state,
            lambda: [jnp.zeros(3)],
            r'a dict of collections.*nnx\.state\(model\).*not list',
        ),
        (
            to_nnx_state,
            lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
            r'nnx\.state\(model\).*not Linear',
        ),
        (
            to_linen_boxes,
            lambda: {'params': dict(variable())},
            r'params/w is .*Param.*nnx\.State',
        ),
        (
            to_linen_boxes,
            lambda: variable(out_sharding=(None, None), optimizer_sharding=('data', None)),
            'params/w has optimizer_sharding, .*remove',
        ),
        (to_linen_boxes, lambda: variable(tag='mine'), 'params/w has tag, .*remove'),
        (
            to_linen_boxes,
            lambda: nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
            r'rngs/count is a RngCount.*nnx\.state\(model, nnx\.Param\)',
        ),
        (
            to_linen_boxes,
            lambda: variable(
                out_sharding=('a', None),
                sharding_rules=(('a', 'data'),),
                linen_meta_type=nn.Partitioned,
            ),
            'params/w has rules.*Partitioned .*partitioner',
        ),
        (
            to_params_axes,
            lambda: {'params': {'w': box((3,), 'mlp', rules=(('mlp', 'data'),))}},
            r"params/w has names \('mlp',\) with rules, .*partitioner",
        ),
        (
            to_params_axes,
            lambda: {'params': {'w': box((3,), 'mlp', mesh=MESH)}},
            'params/w.*with a mesh, .*partitioner',
        ),
        (
            to_params_axes,
            lambda: variable(out_sharding=(('data', 'model'), None)),
            'params/w.*with tuples of mesh axes, .*partitioner',
        ),
    ],
)
def test_arrays_that_cannot_be_converted(convert, tree, message):
    with nnx.use_eager_sharding(False):
        made = tree()
    with pytest.raises(ValueError, match=message):
        convert(made)


@pytest.mark.parametrize('turn', [to_nnx_state, to_linen_boxes, to_params_axes])
def test_the_content_of_one_collection_is_an_error(turn):
    model = nn.Dense(4, name='OnlyHere')
    made = model.init(jax.random.key(0), jnp.ones((1, 3)))
    given = {'OnlyHere_0': made['params']}
    for tree in (given, freeze(given), made['params']):
        with pytest.raises(ValueError, match=r"pass all variables, \{'params': ...\}"):
            turn(tree)
    with pytest.raises(ValueError):  # no variable type was registered by the failed calls
        nnx.variable_type_from_name('OnlyHere_0')
    turn(made)
    turn({'batch_stats': given})
    turn({})
