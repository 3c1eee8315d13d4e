"""T5X's standard rules, and the train states that rules lay out."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    TrainState,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)

pytestmark = pytest.mark.core


SHARDED = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model')]
SHARDED += [('joined_kv', 'model')]

WHOLE = ['kv', 'relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack', 'mlp_activations']


@pytest.mark.parametrize(
    'dims, embed',
    [((1, 1), []), ((2, 1), ['model']), ((1, 2), ['data']), ((2, 2), ['model', 'data'])],
)
def test_E14_standard_rules(dims, embed):
    """'embed' is the last sharded name, so the other names take their axes first."""
    rules = standard_logical_axis_rules(*dims, additional_rules=[('mine', 'data')])
    assert rules[-1] == ('mine', 'data')
    sharded = [rule for rule in rules[:-1] if rule[1] is not None]
    assert sharded == [*SHARDED, *(('embed', axis) for axis in embed)]
    whole = [name for name, axes in rules if axes is None]
    assert sorted(whole) == sorted([*WHOLE, *([] if embed else ['embed'])])


EMBEDDED = ('batch', 'length', 'embed')


@pytest.mark.parametrize(
    'dims, names, spec',
    [
        ((1, 1), ('vocab', 'embed'), P('model', None)),
        ((1, 1), ('embed', 'mlp'), P(None, 'model')),
        ((1, 1), EMBEDDED, P('data', None, None)),
        ((2, 1), ('vocab', 'embed'), P('model', None)),
        ((2, 1), ('embed', 'mlp'), P(None, 'model')),
        ((2, 1), ('embed', 'heads', 'kv'), P(None, 'model', None)),
        ((2, 1), ('embed', 'joined_kv'), P(None, 'model')),
        ((2, 1), EMBEDDED, P('data', None, 'model')),
        ((1, 2), ('vocab', 'embed'), P('model', 'data')),
        ((1, 2), ('embed', 'mlp'), P('data', 'model')),
        ((1, 2), ('embed', 'heads', 'kv'), P('data', 'model', None)),
        ((1, 2), EMBEDDED, P('data', None, None)),
        ((2, 2), ('vocab', 'embed'), P('model', 'data')),
        ((2, 2), ('embed', 'mlp'), P('data', 'model')),
        ((2, 2), EMBEDDED, P('data', None, 'model')),
        ((2, 2), ('embed',), P('model')),
    ],
)
def test_E14_specs_by_the_standard_rules(dims, names, spec):
    assert logical_to_mesh_axes(names, standard_logical_axis_rules(*dims)) == spec


def test_E14_other_numbers_of_dims_are_errors():
    with pytest.raises(ValueError, match=r'activation_partitioning_dims=3 .*1 or 2'):
        standard_logical_axis_rules(3, 1)


E15_RULES = [('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model')]

SIZES = {'vocab': 512, 'embed': 256, 'mlp': 1024}

NAMES = {('logits_dense',): ('vocab', 'embed'), ('mlp', 'wo', 'kernel'): ('embed', 'mlp')}


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


@pytest.mark.parametrize(
    'settings, like_params',
    [
        ({}, set()),
        ({'momentum': 0.9}, {'ema'}),
        ({'factored': False}, {'v'}),
    ],
    ids=['factored', 'factored with momentum', 'not factored'],
)
def test_E15_specs_of_adafactor(settings, like_params):
    """Statistics of a parameter's shape have its spec; factored ones the spec of their dimension.

    T5X always replicates factored statistics.
    """
    state, specs = e15_specs(optax.adafactor(0.1, **settings))
    shapes = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))
    found = dict(jax.tree_util.tree_leaves_with_path(specs.opt_state, is_leaf=_is_spec))
    assert shapes.keys() == found.keys()
    seen = set()
    for path, leaf in shapes.items():
        fields = [key.name for key in path if hasattr(key, 'name')]
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        if not keys:
            continue
        sizes, spec = [SIZES[name] for name in NAMES[keys]], found[path]
        sharded = [i for i, name in enumerate(NAMES[keys]) if name in ('vocab', 'mlp')]
        if leaf.shape == tuple(sizes):
            seen.add(fields[-1])
            assert spec == P(*('model' if i in sharded else None for i in range(2)))
        elif leaf.shape == (1,):
            assert all(axes is None for axes in spec)
        else:
            [kept] = [i for i in range(2) if leaf.shape == (sizes[i],)]
            assert spec == P('model' if kept in sharded else None)
    assert seen == like_params


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
