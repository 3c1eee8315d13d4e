"""The spec of every array in the states of optax's optimizers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import by_path
from jax.sharding import PartitionSpec as P
from optimized_states import (
    FACTORED,
    OPTIMIZERS,
    PARAMETERS,
    RULES,
    abstract_state,
    partitioner_of_4_by_2,
)

from partitioning import PjitPartitioner, unbox

pytestmark = pytest.mark.core

GALORE = optax.contrib.galore(1e-2, rank=4)

# The number of statistics that have the shape of their parameter.
FULL_SHAPES = {
    'adamw': 2 * 3,
    'clip and adam': 2 * 3,
    'sgd with momentum': 3,
    'lion': 3,
    'adafactor': 1,  # the bias is too small to be factored
    'adafactor with momentum': 1 + 3,
    'adafactor, not factored': 3,
    'multi_transform': 2 * 1 + 2,
    'masked': 2 * 1,
    'MultiSteps': 3 * 3,
    'inject_hyperparams': 2 * 3,
    'muon': 2 + 2 * 1,  # Adam for arrays that are not matrices
    'schedule_free': 2 * 3,
    'prodigy': 4 * 3,
    'novograd': 3,
    'amsgrad': 3 * 3,
    'adadelta': 2 * 3,
    'sophia': 2 * 3,
    'lbfgs': 3 * 3,  # in addition to two histories, which have one more dimension
    'sm3': 3,
    'galore': 2,
}


def linen_spec(path):
    """The spec of a parameter, by linen."""
    return nn.logical_to_mesh_axes(PARAMETERS[path][1], RULES)


def spec_by_sizes(path, shape):
    """The expected spec of a statistic, from its path and shape alone."""
    owners = [p for p in PARAMETERS if f'/{p}/' in f'{path}/']
    if not owners or not shape or shape == (1,):
        return P(*[None] * len(shape))
    full = PARAMETERS[owners[0]][0]
    axes = dict(zip(full, linen_spec(owners[0]), strict=True))
    history = (None,) if shape[0] not in full else ()
    return P(*history, *(axes[size] for size in shape[len(history) :]))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_statistic_follows_its_parameter(name):
    state = abstract_state(name)
    specs = by_path(partitioner_of_4_by_2().get_mesh_axes(state))
    arrays = by_path(unbox(state))
    assert specs.keys() == arrays.keys()
    full_shapes = 0
    for path, array in arrays.items():
        if path.startswith('params/'):
            assert specs[path] == linen_spec(path.removeprefix('params/')), path
            continue
        owner = next((p for p in PARAMETERS if path.endswith(f'/{p}')), None)
        full_shapes += owner is not None and array.shape == PARAMETERS[owner][0]
        if name != 'galore':  # it projects arrays to sizes that no parameter has
            assert specs[path] == spec_by_sizes(path, array.shape), path
        elif owner is not None and array.shape == PARAMETERS[owner][0]:
            assert specs[path] == linen_spec(owner), path
    assert full_shapes == FULL_SHAPES[name]


def test_adafactor_of_a_square():
    """Shapes decide nothing here, so see which statistic varies with the rows of the gradient."""
    tx = optax.adafactor(1e-3, **FACTORED)
    params = {'w': nn.LogicallyPartitioned(jnp.ones((16, 16)), ('embed', 'mlp'))}
    gradient = {'w': jnp.broadcast_to(jnp.arange(1.0, 17.0)[:, None], (16, 16))}
    state = tx.init(unbox(params))
    _, updated = jax.jit(tx.update)(gradient, state, unbox(params))
    partitioner = PjitPartitioner(2, logical_axis_rules=[('embed', 'data'), ('mlp', 'model')])
    specs = by_path(partitioner.get_mesh_axes({'params': params, 'opt_state': state}))
    vectors = {path: x for path, x in by_path(updated).items() if x.shape == (16,)}
    assert len(vectors) == 2
    for path, statistic in vectors.items():
        varies_with_rows = float(np.ptp(statistic)) > 0
        assert specs[f'opt_state/{path}'] == (P('data') if varies_with_rows else P('model'))


@pytest.mark.parametrize(
    'name, path, shape, spec',
    [
        ('sm3', '0/mu/table/0', (32,), P('model')),
        ('sm3', '0/mu/table/1', (16,), P('data')),
        ('sm3', '0/mu/layers/up/0', (2,), P(None)),
        ('sm3', '0/mu/layers/up/1', (16,), P('data')),
        ('sm3', '0/mu/layers/up/2', (64,), P('model')),
        ('sm3', '0/mu/layers/bias/0', (2,), P(None)),
        ('sm3', '0/mu/layers/bias/1', (64,), P('model')),
        ('lbfgs', '0/diff_params_memory/table', (3, 32, 16), P(None, 'model', 'data')),
        (
            'lbfgs',
            '0/diff_updates_memory/layers/up',
            (3, 2, 16, 64),
            P(None, None, 'data', 'model'),
        ),
        ('lbfgs', '0/diff_params_memory/layers/bias', (3, 2, 64), P(None, None, 'model')),
        ('lbfgs', '0/weights_memory', (3,), P(None)),
        ('galore', '0/projector/table', (32, 4), P('model', None)),
        ('galore', '0/base_optimizer_state/mu/table', (4, 16), P(None, 'data')),
        ('galore', '0/projector/layers/bias', (64, 2), P('model', None)),
        ('galore', '0/base_optimizer_state/nu/layers/bias', (2, 2), P(None, None)),
        ('galore', '0/projector/layers/up', (0, 0), P(None, None)),
        ('galore', '0/base_optimizer_state/nu/layers/up', (2, 16, 64), P(None, 'data', 'model')),
        ('sophia', '0/hessian_fn_state/key', (2,), P(None)),
        ('novograd', '0/nu/layers/up', (), P()),
    ],
)
def test_arrays_of_other_shapes_than_their_parameter(name, path, shape, spec):
    state = abstract_state(name)
    assert by_path(unbox(state))[f'opt_state/{path}'].shape == shape
    specs = by_path(partitioner_of_4_by_2().get_mesh_axes(state))
    assert specs[f'opt_state/{path}'] == spec


def box(shape, *names):
    return nn.LogicallyPartitioned(np.zeros(shape, 'float32'), names)


@pytest.mark.parametrize(
    'params, tx, expected',
    [
        pytest.param(
            {'w': box((16, 16), 'embed', 'mlp'), 'b': box((16,), 'mlp')},
            optax.sm3(1e-2),
            {'0/mu/w/0': P('data'), '0/mu/w/1': P('model'), '0/mu/b/0': P('model')},
            id='sm3 of a square',
        ),
        pytest.param(
            {'w': box((16, 16), 'embed', 'mlp')},
            optax.sm3(1e-2),
            {'0/mu/w/0': P('data'), '0/mu/w/1': P('model')},
            id='sm3 of one square',
        ),
        pytest.param(
            [box((16, 8), 'embed', None), box((8, 16), 'mlp', None)],
            optax.sm3(1e-2),
            {
                **{'0/mu/0/0': P('data'), '0/mu/0/1': P(None)},
                **{'0/mu/1/0': P('model'), '0/mu/1/1': P(None)},
            },
            id='sm3 of a list',
        ),
        pytest.param(
            [box((16, 8), 'embed', 'mlp'), box((8, 16), 'mlp', 'embed')],
            optax.contrib.muon(1e-2),
            {'inner_states/muon/inner_state/0/mu/1': P('model', 'data')},
            id='muon of a list',
        ),
        pytest.param(
            {'attention': {'key': box((16, 8), 'embed', 'mlp')}, 'b': box((8,), 'mlp')},
            optax.contrib.sophia(1e-2),
            {'0/hessian_fn_state/key': P(None), '0/mu/attention/key': P('data', 'model')},
            id="sophia's random key next to a parameter 'key'",
        ),
        pytest.param(
            {'w': box((2, 16, 8), 'layers', 'embed', 'mlp'), 's': box(())},
            optax.lbfgs(memory_size=2),
            {
                '0/diff_params_memory/w': P(None, None, 'data', 'model'),
                '0/diff_params_memory/s': P(None),
                '0/weights_memory': P(None),
            },
            id='as many histories as layers',
        ),
        pytest.param(
            {'w': box((16, 16), 'embed', 'mlp')},
            GALORE,
            {
                '0/projector/w': P('data', None),
                '0/base_optimizer_state/mu/w': P(None, 'model'),
            },
            id='galore of a square',
        ),
        pytest.param(
            {'u': box((8, 16), 'mlp', 'embed'), 'w': box((16, 8), 'embed', 'mlp')},
            GALORE,
            {
                **{'0/projector/u': P('data', None), '0/projector/w': P('data', None)},
                '0/base_optimizer_state/mu/u': P('model', None),
                '0/base_optimizer_state/mu/w': P(None, 'model'),
            },
            id='galore of wide and tall',
        ),
    ],
)
def test_layouts_by_hand(params, tx, expected):
    def init():
        return {'params': params, 'opt_state': tx.init(unbox(params))}

    axes = partitioner_of_4_by_2().get_mesh_axes(jax.eval_shape(init))
    specs = by_path(axes)
    assert {path: specs[f'opt_state/{path}'] for path in expected} == expected
