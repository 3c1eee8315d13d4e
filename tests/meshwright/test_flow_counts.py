"""The README's program of its users traces the model once and walks the state once, counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partitioning import (
    AxisRules,
    PjitPartitioner,
    Plan,
    TrainState,
    check_compiled_once,
    with_logical_partitioning,
)
from partitioning.partitioner import pjit
from partitioning.plan import building, by_rules

pytestmark = [pytest.mark.core, pytest.mark.smoke]

nn = pytest.importorskip('flax.linen', reason='the model needs flax')
RULES = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model')]
BATCH = np.ones((8, 16), 'float32')
TX = optax.adam(1e-2)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = with_logical_partitioning(nn.initializers.normal(), ('embed', 'mlp'))
        return nn.Dense(32, kernel_init=init, use_bias=False)(x)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def init(key):
    return TrainState.create(Model().init(key, BATCH), TX)


def train_step(state, batch):
    def loss(params):
        return jnp.mean(Model().apply({'params': params}, batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads, TX), {'loss': value}


@pytest.fixture(name='walks')
def _walks(monkeypatch):
    """Counts the walks over states, of whichever module."""
    walk = Counted(by_rules.walk)
    for module in (by_rules, building):
        monkeypatch.setattr(module, 'walk', walk)
    return walk


def flow(partitioner, init):
    """The README's example."""
    plan = partitioner.plan(init, jax.random.key(0))
    state = plan.init(jax.random.key(0))
    step = partitioner.partition(
        train_step,
        (plan.specs, partitioner.data_partition_spec),
        (plan.specs, None),
        donate_argnums=0,
    )
    for _ in range(2):
        state, metrics = step(state, BATCH)
    plan.check(state)
    check_compiled_once(step)
    return plan, metrics


def test_the_example_traces_once_and_walks_once(walks):
    counted = Counted(init)
    plan, metrics = flow(PjitPartitioner(2, logical_axis_rules=RULES), counted)
    assert (counted.calls, walks.calls) == (1, 1)
    assert float(metrics['loss']) > 0
    str(plan), plan.shardings, plan.logical_axes, plan.abstract_state, plan.audit(), plan.lint()
    assert (counted.calls, walks.calls) == (1, 1)


def test_a_plan_of_a_file_traces_once_and_walks_once(walks, tmp_path, monkeypatch):
    """The plan lays out the state alone: no rule is resolved."""
    rules = PjitPartitioner(2, logical_axis_rules=RULES)
    flow(rules, init)[0].save(tmp_path / 'plan.json')
    loaded = Plan.load(tmp_path / 'plan.json')
    monkeypatch.setattr(pjit, 'build_plan', None)
    monkeypatch.setattr(by_rules, 'try_resolve', None)
    walks.calls, counted = 0, Counted(init)
    plan, _ = flow(PjitPartitioner(2, loaded, logical_axis_rules=[('batch', 'data')]), counted)
    assert (counted.calls, walks.calls) == (1, 1)
    assert plan['params/Dense_0/kernel'].shard_shape == (4, 16)


def test_init_makes_as_many_states_as_it_is_asked_for():
    """plan.init runs the traced program: init itself is not called again."""
    counted = Counted(lambda key: {'w': jax.random.normal(key, (8, 4)), 'step': jnp.int32(0)})
    partitioner = PjitPartitioner(2, AxisRules(names=[('w', ('embed', None))]))
    plan = partitioner.plan(counted, jax.random.key(0))
    for seed in (0, 7):
        expected = jax.random.normal(jax.random.key(seed), (8, 4))
        np.testing.assert_allclose(plan.init(jax.random.key(seed))['w'], expected, rtol=1e-6)
    assert counted.calls == 1


def test_init_refuses_other_arguments():
    def init(scale, shift):
        return {'w': scale * jnp.ones((8, 4)) + shift['by']}

    partitioner = PjitPartitioner(2, AxisRules(names=[('w', ('embed', None))]))
    plan = partitioner.plan(init, jnp.float32(3), {'by': np.zeros(4, 'float32')})
    shift = {'by': np.arange(4, dtype='float32')}
    np.testing.assert_array_equal(
        plan.init(np.float32(3), shift)['w'], np.tile(3 + np.arange(4.0), (8, 1))
    )
    for args, said in [
        (
            (jnp.float32(3), {'by': np.zeros(2, 'float32')}),
            r'float32\[4\].*float32\[2\].*make the plan again',
        ),
        ((jnp.int32(3), shift), r'float32\[\].*int32\[\].*make the plan again'),
        ((jnp.float32(3), {'to': shift['by']}), "'by'.*'to'.*make the plan again"),
        ((jnp.float32(3),), r'2 of them, but got 1: write plan.init\(scale, shift\)'),
    ]:
        with pytest.raises(ValueError, match=f'(?s){said}'):
            plan.init(*args)
