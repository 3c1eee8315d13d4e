"""Steps of optax's optimizers over a mesh: values, fixed point, compilations and bytes."""

import functools
import math
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import by_path
from optimized_states import (
    OPTIMIZERS,
    PARAMETERS,
    TOKENS,
    Model,
    initializer,
    partitioner_of_4_by_2,
)

from partitioning import check_compiled_once, unbox

pytestmark = pytest.mark.core

# One for each kind of layout in test_optimizer_layouts.py: a statistic of another shape, a copy for
# several steps, a history, a projection, and a search that calls the objective.
STEPPED = ('adamw', 'adafactor', 'adafactor with momentum', 'MultiSteps', 'sm3')
SLOW = [pytest.param(name, marks=pytest.mark.long) for name in ('lbfgs', 'galore')]
EVERY_OPTIMIZER = pytest.mark.parametrize('name', [*STEPPED, *SLOW])
WITH_MODEL = ('adamw', 'adafactor')  # the others use `pull` alone, which compiles faster


def _targets():
    rng = np.random.default_rng(0)
    signs = {path: rng.choice([-1.0, 1.0], shape) for path, (shape, *_) in PARAMETERS.items()}
    return {path: s * rng.uniform(1, 2, s.shape).astype('float32') for path, s in signs.items()}


TARGETS = _targets()


def pull(params):
    """An objective whose gradients are never near 0, where Adam would amplify rounding errors.

    It is not quadratic, so L-BFGS does not reach the minimum in two steps.
    """
    distances = [x - TARGETS[path] for path, x in by_path(params).items()]
    return sum(jnp.sum(d**2 / 2 + d**4 / 40) for d in distances)


def with_model(params, tokens):
    return jnp.mean(jnp.square(Model().apply({'params': params}, tokens))) + pull(params)


def functions(name):
    tx = optax.with_extra_args_support(OPTIMIZERS[name]())

    def step(state, tokens):
        value_fn = pull
        if name in WITH_MODEL:
            value_fn = functools.partial(with_model, tokens=tokens)
        value, grads = jax.value_and_grad(value_fn)(state['params'])
        # L-BFGS searches along a line, for which it needs the objective.
        extra = {'value': value, 'grad': grads, 'value_fn': value_fn}
        updates, opt_state = tx.update(grads, state['opt_state'], state['params'], **extra)
        params = optax.apply_updates(state['params'], updates)
        return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}

    return tx, initializer(tx), step


@functools.cache
def params_on_one_device():
    return unbox(jax.jit(Model().init)(jax.random.key(0), TOKENS[:1])['params'])


@functools.cache
def run(name):
    """Two steps over the mesh and two on one device."""
    partitioner = partitioner_of_4_by_2()
    tx, init, step = functions(name)
    plan = partitioner.plan(init, jax.random.key(0))
    state = plan.init(jax.random.key(0))
    born = {path: x.sharding for path, x in by_path(state).items()}
    resources = (plan.specs, partitioner.data_partition_spec)
    partitioned = partitioner.partition(step, resources, plan.specs, donate_argnums=0)
    params = params_on_one_device()
    plain_state = {'params': params, 'opt_state': tx.init(params), 'step': jnp.int32(0)}
    # L-BFGS starts with weakly typed numbers, so its step would compile twice.
    plain_state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), plain_state)
    plain_step = jax.jit(step)
    sharded, plain = [], []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter('error')  # jax warns if it cannot reuse a donated array
            state = partitioned(state, TOKENS)
        plain_state = plain_step(plain_state, TOKENS)
        sharded.append(by_path(jax.device_get(state)))
        plain.append(by_path(jax.device_get(plain_state)))
    return types.SimpleNamespace(
        plan=plan, born=born, state=state, step=partitioned, sharded=sharded, plain=plain
    )


# Rounding moves singular vectors by its ratio to the gap between singular values, here 1 in 12, and
# the line search of L-BFGS divides by differences of values.
TOLERANCES = {'galore': 5e-5, 'lbfgs': 5e-5}


@EVERY_OPTIMIZER
def test_steps_equal_those_of_one_device(name):
    """Two steps are compared, because MultiSteps updates nothing in the first.

    Errors are relative to the largest element of each array; an array of 0 +- 1e-9 has none.
    """
    result = run(name)
    for sharded, plain in zip(result.sharded, result.plain, strict=True):
        assert sharded.keys() == plain.keys()
        for path, expected in plain.items():
            tolerance = TOLERANCES.get(name, 1e-5) if expected.dtype.kind == 'f' else 0
            atol = tolerance * float(np.abs(expected).max(initial=0))
            np.testing.assert_allclose(sharded[path], expected, rtol=0, atol=atol, err_msg=path)
    first, second = result.plain
    moved = {path for path, x in first.items() if not np.array_equal(x, second[path])}
    assert {f'params/{path}' for path in PARAMETERS} <= moved


@EVERY_OPTIMIZER
def test_a_step_is_a_fixed_point_and_compiles_once(name):
    result = run(name)
    result.plan.check(result.state)
    for path, array in by_path(result.state).items():
        assert array.sharding.is_equivalent_to(result.born[path], array.ndim), path
    check_compiled_once(result.step)


# Bytes.


def bytes_of_a_device(state):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


# Elements on a device: one copy of all parameters, and the statistics of a factored Adafactor.
COPY = sum(math.prod(shape) // num_shards for shape, _, num_shards in PARAMETERS.values())
ROWS, COLUMNS, OTHERS = 16 // 4 + 2 * 16 // 4 + 1, 32 // 2 + 2 * 64 // 2 + 1, 1 + 1 + 2 * 64 // 2


@pytest.mark.parametrize(
    'name, elements',
    [
        ('adamw', 3 * COPY + 2),
        ('adafactor', COPY + ROWS + COLUMNS + OTHERS + 2),
        ('adafactor with momentum', 2 * COPY + ROWS + COLUMNS + OTHERS + 3),
        ('sm3', 2 * COPY + (32 // 2 + 16 // 4) + (2 + 16 // 4 + 64 // 2) + (2 + 64 // 2) + 1),
    ],
)
def test_bytes_by_hand(name, elements):
    assert COPY == 64 + 256 + 64
    assert bytes_of_a_device(run(name).state) == 4 * elements
