"""T5X's standard rules, the train states that they lay out, and partitioned functions."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    TrainState,
    global_mesh_defined,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core


# In T5X's order.
COMMON = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('kv', None),
    ('joined_kv', 'model'),
]
REPLICATED = ['relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack', 'mlp_activations']
T5X_RULES = {
    (1, 1): [*COMMON[:2], ('embed', None), *COMMON[2:]],
    (2, 1): [*COMMON, ('embed', 'model')],
    (1, 2): [*COMMON, ('embed', 'data')],
    (2, 2): [*COMMON, ('embed', 'model'), ('embed', 'data')],
}


@pytest.mark.parametrize('dims', T5X_RULES)
def test_E14_standard_rules(dims):
    ours = standard_logical_axis_rules(*dims, additional_rules=[('mine', 'data')])
    theirs = [*T5X_RULES[dims], *((name, None) for name in REPLICATED), ('mine', 'data')]
    assert sorted(ours, key=repr) == sorted(theirs, key=repr) and ours[-1] == ('mine', 'data')
    known = sorted({name for name, _ in theirs})
    triples = itertools.permutations(['batch', 'vocab', 'embed', 'mlp', 'kv', 'length', 'mine'], 3)
    for names in (*itertools.permutations(known, 2), *triples):
        assert logical_to_mesh_axes(names, ours) == nn.logical_to_mesh_axes(names, theirs)


@pytest.mark.parametrize('dims', [(3, 1), (1, 3), (0, 1)])
def test_E14_other_numbers_of_dims_are_errors(dims):
    with pytest.raises(ValueError, match=f'={dims[0]} and .*={dims[1]} .*1 or 2'):
        standard_logical_axis_rules(*dims)


E15_RULES = [('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model')]

SIZES = {'vocab': 512, 'embed': 256, 'mlp': 1024}


def e15_params():
    def boxed(*names):
        return nn.LogicallyPartitioned(jnp.zeros([SIZES[n] for n in names]), names)

    return {
        'logits_dense': boxed('vocab', 'embed'),
        'mlp': {'wo': {'kernel': boxed('embed', 'mlp')}},
    }


def e15_specs(tx):
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    state = jax.eval_shape(lambda: TrainState.create(e15_params(), tx))
    return state, one.get_mesh_axes(state)


def _is_spec(x):
    return isinstance(x, P)


def test_E15_specs_of_a_train_state():
    _, specs = e15_specs(optax.sgd(0.1))
    assert specs.step in (None, P())
    assert specs.params['logits_dense'] == P('model', None)
    assert specs.params['mlp']['wo']['kernel'] == P(None, 'model')


def test_E15_specs_of_adafactor():
    """Factored statistics have the spec of the dimension that is left; T5X replicates them.

    test_optimizer_layouts.py has all statistics of all optimizers.
    """
    _, specs = e15_specs(optax.adafactor(0.1))
    found = {
        jax.tree_util.keystr(path[-2:], simple=True, separator='/'): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs.opt_state, is_leaf=_is_spec)
    }
    rows, columns = found['v_row/logits_dense'], found['v_col/logits_dense']
    assert (rows, columns) == (P(None), P('model'))  # of (512, 256), over 'model' and None


def test_E15_optimizer_states_are_born_sharded():
    """jit(tx.init) would not inherit the shardings of the parameters."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    state = one.init(lambda _: TrainState.create(e15_params(), optax.adam(0.1)), 0)
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert specs == {(512, 256): P('model', None), (256, 1024): P(None, 'model')}


def test_E15_a_name_without_a_rule_is_an_error():
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=[('batch', 'data')])
    with pytest.raises(ValueError, match=r'^Failed to map logical axes for \S*logits_dense.*vocab'):
        one.get_mesh_axes(jax.eval_shape(lambda: TrainState.create(e15_params(), optax.sgd(0.1))))


def test_E17_axis_names_are_one_leaf():
    names = AxisNames('a', 'b')
    assert jax.tree.leaves({'x': names}) == [names]
    assert repr(names) == "AxisNames('a', 'b')"


def test_E18_a_parameter_without_names_is_an_error():
    variables = {
        'params': {'named': jnp.zeros(4), 'nameless': jnp.zeros((8, 4))},
        'params_axes': {'named_axes': AxisMetadata(('mlp',))},
    }
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    message = r'Missing axis names for parameters: params/nameless of shape \(8, 4\) '
    with pytest.raises(ValueError, match=message):
        one.get_mesh_axes(TrainState.create(variables, optax.sgd(0.1)))


def test_E18_any_optimizer_has_logical_axes():
    """T5X only accepts optimizers with a method that derives their axes."""
    moved = optax.trace(0.9)
    custom = optax.GradientTransformation(lambda params: {'mine': moved.init(params)}, moved.update)
    state, specs = e15_specs(custom)
    found = jax.tree.leaves(specs.opt_state, is_leaf=_is_spec)
    assert len(found) == len(jax.tree.leaves(state.opt_state)) == 2
    assert set(found) == {P('model', None), P(None, 'model')}


# Partitioned functions on today's jax.

RULES = [('batch', 'data'), ('mlp', 'model')]


@pytest.mark.filterwarnings('error::DeprecationWarning')
def test_E19_partitioned_functions_work_on_todays_jax():
    """There is no use of pjit, `with mesh:` or jax.tree_map, which are gone or warn."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert not global_mesh_defined()
    seen = []

    def step(x):
        seen.append(global_mesh_defined())
        return with_sharding_constraint(2 * x, P('data', 'model'))

    x = jnp.arange(64.0).reshape(8, 8)
    # x is not committed to devices, so it may be laid out in any way; keywords are accepted.
    y = one.partition(step, (P('data'),), P('data', 'model'))(x=x)
    np.testing.assert_array_equal(y, 2 * np.arange(64.0).reshape(8, 8))
    assert seen == [True]


def test_E19_constraints_hold_on_cpu():
    """T5X silently skips them."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    constrained = one.partition(
        lambda x: with_sharding_constraint(x + 1, P('data', 'model')), (P(),), None
    )
    text = constrained.lower(jnp.zeros((8, 8))).as_text()
    assert 'sdy.sharding_constraint' in text or '@Sharding' in text
    with jax.set_mesh(one.mesh):
        x = jax.jit(lambda x: with_sharding_constraint(x + 1, P('data', 'model')))(
            jnp.zeros((8, 8))
        )
    assert x.sharding.spec == P('data', 'model')
