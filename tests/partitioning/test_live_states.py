"""States after initialization: their names, static fields and dtypes are still understood."""

import copy
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    TrainState,
    check_compiled_once,
    unbox,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

MESH = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
RULES = [('batch', 'data'), ('embed', None), ('mlp', 'model')]
BATCH = np.linspace(-1, 1, 32, dtype='float32').reshape(8, 4)
ADAM = optax.adam(1e-2)
box = nn.LogicallyPartitioned


def make_partitioner(**settings):
    return PjitPartitioner(mesh=MESH, **{'logical_axis_rules': RULES, **settings})


def init(names=('embed', 'mlp')):
    w = box(jnp.full((4, 8), 0.5), names)
    return TrainState.create({'w': w, 'b': box(jnp.ones(8), names[1:])}, ADAM)


def step(state, batch):
    grads = jax.grad(lambda p: jnp.mean((batch @ p['w'] + p['b']) ** 2))(state.params)
    return state.apply_gradients(grads, ADAM)


# Names.

SPECS = {'w': P(None, 'model'), 'b': P('model')}


@pytest.fixture(name='trained', scope='module')
def _trained():
    """A partitioner with the plan of a state, and the state after a step."""
    partitioner = make_partitioner()
    plan = partitioner.plan(init)
    run = partitioner.partition(step, (plan.specs, P('data')), plan.specs)
    return partitioner, plan, run(plan.init(), BATCH)


def test_every_question_about_a_live_state_has_the_answer_of_its_plan(trained):
    partitioner, plan, state = trained
    assert partitioner.plan(state) == plan
    assert partitioner.get_mesh_axes(state).params == SPECS
    assert partitioner.plan(state).shardings.params['b'] == NamedSharding(MESH, P('model'))
    names = partitioner.get_logical_axes(state)
    assert names.params['w'] == names.opt_state[0].mu['w'] == AxisNames('embed', 'mlp')
    assert partitioner.audit(state).by_role == plan.audit().by_role
    assert not partitioner.audit(state).misplaced
    assert partitioner.lint(state) == partitioner.lint(partitioner.eval_shape(init))
    moved = jax.device_put(state, NamedSharding(MESH, P()))
    assert {cost.row.path for cost in partitioner.audit(moved).misplaced} >= {'params/w'}


def test_states_that_were_never_seen(trained):
    partitioner, _, state = trained
    other = state.replace(params={**state.params, 'w': jnp.ones((4, 6))})
    for one, unknown in [(make_partitioner(), state), (partitioner, other)]:
        with pytest.raises(ValueError, match=r'Missing axis names.*eval_shape'):
            one.plan(unknown)


def test_another_mesh_uses_the_same_names_and_rules(trained):
    partitioner, _, state = trained
    other = partitioner.with_mesh(AbstractMesh((2, 4), ('data', 'model')))
    assert other.get_mesh_axes(state).params == SPECS
    assert other.plan(state)['params/w'].shard_shape == (4, 8 // 4)
    assert partitioner.plan(state)['params/w'].shard_shape == (4, 8 // 2)


def test_the_last_names_of_a_structure_are_used(trained):
    _, _, state = trained
    partitioner = make_partitioner()
    other = partitioner.with_rules(RULES)
    for names, spec in [(('embed', 'mlp'), SPECS['w']), (('mlp', 'embed'), P('model', None))]:
        partitioner.get_mesh_axes(partitioner.eval_shape(functools.partial(init, names)))
        assert partitioner.get_mesh_axes(state).params['w'] == spec
    with pytest.raises(ValueError, match='Missing axis names'):
        other.plan(state)


def test_the_latest_states_are_remembered_without_their_arrays(trained):
    _, _, state = trained
    partitioner = make_partitioner()
    partitioner.plan(init())
    assert not [x for x in jax.tree.leaves(partitioner._boxed_states) if hasattr(x, 'dtype')]
    assert copy.deepcopy(partitioner._boxed_states) == partitioner._boxed_states
    for size in range(8):
        assert partitioner.plan(state)
        partitioner.plan({'w': box(np.ones((4, 2 + 2 * size)), ('embed', 'mlp'))})
    with pytest.raises(ValueError, match='Missing axis names'):
        partitioner.plan(state)


def test_subclasses_need_not_call_the_constructor(trained):
    class Same(PjitPartitioner):
        def __init__(self, other):
            vars(self).update(vars(other))
            vars(self).pop('_boxed_states', None)

    partitioner = Same(trained[0])
    assert partitioner.plan(init).specs.params == partitioner.get_mesh_axes(trained[2]).params


# Static fields, which every trace of an init function makes anew.


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = nn.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
        return nn.Dense(8, kernel_init=names, use_bias=False)(x)


def flax_init(key):
    model = Model()
    tx = optax.MultiSteps(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), 2)
    params = model.init(key, BATCH)['params']
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def flax_step(state, batch):
    def loss(params):
        return jnp.mean(state.apply_fn({'params': params}, batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


KEY = np.zeros(2, 'uint32')


@functools.cache
def plain_parameters():
    """What jax alone makes of the parameters in three steps."""
    state = unbox(jax.jit(flax_init)(KEY))
    plain_step = jax.jit(flax_step)
    for _ in range(3):
        state, _ = plain_step(state, BATCH)
    return state.params['Dense_0']['kernel']


def by_plan(partitioner):
    plan = partitioner.plan(flax_init, KEY)
    return plan.init(KEY), plan.specs


def by_init(partitioner):
    """The specs and the state come from two traces."""
    specs = partitioner.get_mesh_axes(partitioner.eval_shape(flax_init, KEY))
    return partitioner.init(flax_init, KEY), specs


def by_partition(partitioner):
    """T5X's way: the init function is partitioned."""
    specs = partitioner.get_mesh_axes(partitioner.eval_shape(flax_init, KEY))
    make = lambda key: unbox(flax_init(key))  # noqa: E731
    return partitioner.partition(make, None, specs)(KEY), specs


@pytest.mark.parametrize('way', [by_plan, by_init, by_partition])
def test_specs_of_another_trace(way):
    partitioner = make_partitioner()
    state, specs = way(partitioner)
    run = partitioner.partition(flax_step, (specs, P('data')), (specs, None), donate_argnums=0)
    traced = run.lower(state, BATCH).out_info[0]
    assert jax.tree.structure(traced) == jax.tree.structure(state)
    for _ in range(3):
        state, _ = run(state, BATCH)
        partitioner.plan(state).check(state)
    check_compiled_once(run)
    kernel = state.params['Dense_0']['kernel']
    assert kernel.sharding == NamedSharding(MESH, P(None, 'model'))
    np.testing.assert_allclose(kernel, plain_parameters(), rtol=1e-5)
    another = by_init(partitioner)[0]
    partitioner.plan(flax_init, KEY).check(another)
    run(another, BATCH)


def test_trees_with_other_paths_are_still_refused(trained):
    partitioner, plan, state = trained
    run = partitioner.partition(step, (plan.specs, P('data')), plan.specs)
    renamed = state.replace(params={'w': state.params['w'], 'c': state.params['b']})
    for args in [(renamed, BATCH), (state.params, BATCH), (state,)]:
        with pytest.raises((ValueError, TypeError)):
            run(*args)
    assert run.num_traces() == 0


# Weak types.


def weak_init():
    numbers = {'step': 0, 'rate': 0.1, 'on': True, 'weak': jnp.asarray(2.0)}
    return {'params': {'w': box(jnp.ones((4, 8)), ('embed', 'mlp'))}, **numbers}


def test_no_array_is_weakly_typed():
    partitioner = make_partitioner()
    plan = partitioner.plan(weak_init)
    state = plan.init()
    kinds = {'step': 'int32', 'rate': 'float32', 'on': 'bool', 'weak': 'float32'}
    for made in (state, plan.abstract_state, partitioner.eval_shape(weak_init)):
        assert {name: str(made[name].dtype) for name in kinds} == kinds
        assert not any(x.weak_type for x in jax.tree.leaves(made))

    def double(state):
        return jax.tree.map(lambda x: x + x if x.dtype != bool else x, state)

    run = partitioner.partition(double, (plan.specs,), plan.specs)
    run.lower(plan.abstract_state)
    run(run(state))
    check_compiled_once(run)


# What is not an array.


class Unregistered:
    pass


def test_optimizers_of_other_things_than_arrays(trained):
    def make(key):
        return ADAM.init({'w': jnp.ones(3), 'act': jax.nn.relu})

    message = r'optax \(at test_live_states.py:\d+\) received a .*custom_jvp.*eqx.filter'
    with pytest.raises(ValueError, match=message):
        trained[0].plan(make, KEY)
    with pytest.raises(TypeError, match='ndarray'):  # not from optax
        trained[0].plan(lambda key: jnp.zeros_like(jax.nn.relu), KEY)


@pytest.mark.parametrize(
    'state, said',
    [
        (None, 'None.*return'),
        ({'w': 1.0, 'layers': [{'act': jax.nn.relu}]}, r'function relu at layers/0/act.*eqx'),
        ({'w': 1.0, 'tx': ADAM}, 'function .* at tx/init.*static field'),
        ({'w': 1.0, 'name': 'adam'}, "string 'adam' at name.*static field"),
        ({'w': np.array(['a'])}, 'ndarray of dtype <U1 at w'),
        ({'w': jax.ShapeDtypeStruct((2,), 'int32')}, 'a ShapeDtypeStruct of dtype int32 at w'),
        ({'m': Model()}, 'a Model at m.*arrays only'),
        (Unregistered(), 'an Unregistered.*register_dataclass'),
    ],
)
def test_states_of_other_things_than_arrays(state, said, trained):
    def make(key):
        return state

    for method in (trained[0].plan, trained[0].eval_shape):
        with pytest.raises(ValueError, match=f'^make returned .*{said}'):
            method(make, KEY)
