"""Path rules name arrays of whole states; the arrays of optimizers follow their parameters."""

import jax.numpy as jnp
import optax
import pytest
from boxed_states import by_path
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from test_path_names import (
    ALL,
    NNX_RULES,
    PATHS,
    RULES,
    SHAPES,
    SWAPPED,
    nnx_state,
    params,
    partitioner_of,
)

from partitioning import TrainState, unbox

pytestmark = pytest.mark.core

SPECS = {'enc/kernel': P('data', 'model'), 'enc/bias': P('model'), 'dec/kernel': P('data', 'model')}


@pytest.mark.parametrize('collection', ['batch_stats', 'flax_mutables/batch_stats'])
def test_other_collections_are_named_by_the_full_path(collection):
    variables = {'params': params(), 'batch_stats': {'norm': {'mean': jnp.zeros(16)}}}
    if collection != 'batch_stats':
        variables = TrainState.create(variables, optax.identity())
    partitioner = partitioner_of([*ALL, (f'{collection}/norm/mean', ('mlp',))])
    axes = by_path(partitioner.get_mesh_axes(variables))
    assert axes[f'{collection}/norm/mean'] == P('model')
    assert axes['params/enc/kernel'] == P('data', 'model')
    without = by_path(partitioner_of(ALL).get_mesh_axes(variables))
    assert without[f'{collection}/norm/mean'] == P(None)
    with pytest.raises(ValueError, match="'norm/mean' is never used"):
        partitioner_of([*ALL, ('norm/mean', ('mlp',))]).get_mesh_axes(variables)


TXS = {
    'adam': lambda: optax.adam(1e-3),
    'lbfgs': lambda: optax.lbfgs(memory_size=3),  # its state has a field `params`
    'adafactor': lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
}
STATES = {
    'ours': lambda p, tx: TrainState.create({'params': p}, tx),
    'flax': lambda p, tx: train_state.TrainState.create(apply_fn=None, params=p, tx=tx),
    'dict': lambda p, tx: {'params': p, 'opt_state': tx.init(unbox(p))},
    'optimizer first': lambda p, tx: {'a': tx.init(unbox(p)), 'params': p},
}


def follows(path, shape, of):
    """The expected spec of a statistic: each dimension as in the parameter, found by its size."""
    owner = next((p for p in PATHS if path.endswith(p)), None)
    if owner is None or shape == (1,):
        return P(*[None] * len(shape))
    axes = dict(zip(SHAPES[owner], of[owner], strict=True))
    return P(*(axes.get(size) for size in shape))


@pytest.mark.parametrize('tx', TXS)
@pytest.mark.parametrize('kind', STATES)
@pytest.mark.parametrize('boxed', [False, True])
def test_optimizer_state_follows(kind, tx, boxed):
    """One parameter has the opposite order of names, given by a rule or replacing its box."""
    state = STATES[kind](params(boxed), TXS[tx]())
    partitioner = partitioner_of([SWAPPED] if boxed else [SWAPPED, *ALL])
    expected = SPECS | {'enc/kernel': P('model', 'data')}
    shapes = {p: jnp.shape(x) for p, x in by_path(unbox(state)).items()}
    axes = by_path(partitioner.get_mesh_axes(state))
    assert axes.keys() == shapes.keys()
    for path, spec in axes.items():
        assert spec == follows(path, shapes[path], expected), path
    copies = [p for p in axes if p.endswith('enc/kernel') and shapes[p] == SHAPES['enc/kernel']]
    assert len(copies) == {'adam': 3, 'lbfgs': 4, 'adafactor': 1}[tx]


def test_optimizer_state_of_overridden_nnx_variables_follows():
    named = {'kernel_metadata': {'out_sharding': ('embed', 'mlp')}}
    rules = [('enc/kernel', ('mlp', 'embed')), *NNX_RULES[1:]]
    axes = partitioner_of(rules).get_mesh_axes(nnx_state(optax.adam(1e-3), **named))
    assert axes[0]['enc']['kernel'] == P('model', 'data')
    assert axes[1]['opt_state'][0]['mu']['enc']['kernel'] == P('model', 'data')


@pytest.mark.parametrize('named', ['by path', 'boxes', 'boxes everywhere'])
def test_arrays_in_an_optimizer_are_not_parameters(named):
    """The parameters are not under 'params', as some arrays of L-BFGS; it has other rules."""
    rules = ALL if named == 'by path' else ()
    model = params(boxed=named != 'by path')
    state = {
        'model': model,
        'opt': optax.scale_by_lbfgs(3).init(model if named == 'boxes everywhere' else unbox(model)),
    }
    replicated = [('embed', None), ('mlp', 'model')]
    partitioner = partitioner_of(rules, rules=replicated, optimizer=RULES)
    plan = partitioner.plan(state)
    assert plan['model/enc/kernel'].spec == P(None, 'model')
    assert {plan[f'model/{path}'].role for path in PATHS} == {'parameters'}
