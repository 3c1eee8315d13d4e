"""Path rules name arrays of whole states; the arrays of optimizers follow their parameters."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import by_path
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from test_path_names import (
    ALL,
    PATHS,
    RULES,
    SHAPES,
    SWAPPED,
    params,
    partitioner_of,
)

from partitioning import TrainState, standard_logical_axis_rules, suggest_rules, unbox

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


ZERO = {'rules': [('embed', None), ('mlp', 'model')], 'optimizer': RULES}
WHOLE_TREES = {
    'tuple': lambda p, opt: (p, opt, jnp.zeros((), jnp.int32), jax.random.PRNGKey(0)),
    'list': lambda p, opt: [opt, p],
    'dict': lambda p, opt: {'model': p, 'tx': opt},
    'a NamedTuple': lambda p, opt: collections.namedtuple('LoopState', 'net opt')(p, opt),
    'a nested one': lambda p, opt: {'a': collections.namedtuple('LoopState', 'net opt')(p, opt)},
}


@pytest.mark.parametrize('tx', TXS)
@pytest.mark.parametrize('kind', WHOLE_TREES)
@pytest.mark.parametrize('named', ['by path', 'by short path', 'boxes everywhere'])
def test_rules_for_the_optimizer_reach_it_without_the_key_params(named, kind, tx):
    boxed = named == 'boxes everywhere'
    model = params(boxed)
    state = WHOLE_TREES[kind](model, TXS[tx]().init(model))
    by_name = [(f'(.*/)?{path}', names) for path, names in ALL]
    rules = () if boxed else ALL if named == 'by short path' else by_name
    plan = partitioner_of(rules, **ZERO).plan(state)
    parameters = {row.path: row.spec for row in plan.rows if row.role == 'parameters'}
    assert len(parameters) == len(PATHS)
    for path, spec in parameters.items():
        assert spec == (P('model') if path.endswith('bias') else P(None, 'model')), path
    followers = [row for row in plan.rows if row.path not in parameters and row.shape]
    assert len([row for row in followers if row.role == 'optimizer']) >= 2 * len(PATHS)
    for row in followers:
        assert row.spec == follows(row.path, row.shape, SPECS), row.path
    used = suggest_rules(state, {'data': 4, 'model': 2})
    again = partitioner_of(used, rules=standard_logical_axis_rules()).plan(state)
    assert {row.path for row in again.rows if row.role == 'parameters'} == {*parameters}


def test_rules_for_the_optimizer_that_reach_no_array():
    state = {'weights': params(False), 'momentum': params(False)}
    rules = [(f'.*/{path}', names) for path, names in ALL]
    with pytest.raises(ValueError, match=r"no array.*momentum and weights .* the key 'params'"):
        partitioner_of(rules, **ZERO).plan(state)


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
