"""Arrays and trees that cannot be converted between linen boxes, nnx variables and params_axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from boxed_states import box
from flax import nnx, struct
from flax.core import freeze

from partitioning import create_mesh, to_linen_boxes, to_nnx_state, to_params_axes

pytestmark = pytest.mark.core

MESH = create_mesh((4, 2), ('data', 'model'))


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
