"""What `plan` takes: a state of any kind, or a function that makes one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from partitioning import PjitPartitioner

eqx = pytest.importorskip('equinox', reason='the extra clients has equinox')

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
SIZES = {'data': 4, 'model': 2}


def init(key):
    return {'w': jax.random.normal(key, (64, 32)), 'b': jnp.zeros(32)}


class Callable:
    def __call__(self, key):
        return init(key)


class Model(eqx.Module):
    w: jax.Array

    def __init__(self, key):
        self.w = init(key)['w']

    def __call__(self, x):
        return x @ self.w

    def remake(self, key):
        return Model(key)


EQUINOX = Model(KEY)
NNX = nnx.Linear(64, 32, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    'state',
    [init(KEY), EQUINOX, NNX, nnx.state(NNX), jax.eval_shape(Model, KEY)],
    ids=['dict', 'equinox', 'nnx', 'nnx.state', 'abstract'],
)
def test_a_state_has_a_plan(state):
    plan = PjitPartitioner(SIZES, 'fsdp').plan(state)
    assert plan.program is None
    assert {row.shape for row in plan.rows} <= {(64, 32), (32,)}
    if not isinstance(jax.tree.leaves(state)[0], jax.ShapeDtypeStruct):
        plan.check(jax.device_put(state, plan.shardings))


@pytest.mark.parametrize(
    'function',
    [
        init,
        lambda key: init(key),
        jax.jit(init),
        functools.partial(init),
        jax.tree_util.Partial(init),
        Callable(),
        Model,
        EQUINOX.remake,
        eqx.filter_jit(lambda key: {'w': EQUINOX.w}),
    ],
    ids=[
        'function',
        'lambda',
        'jit',
        'partial',
        'Partial',
        'callable',
        'class',
        'method',
        'filter_jit',
    ],
)
def test_an_init_function_has_a_plan_that_makes_the_state(function):
    plan = PjitPartitioner(SIZES, 'fsdp').plan(function, KEY)
    plan.check(plan.init(KEY))


def test_a_state_takes_no_arguments():
    with pytest.raises(ValueError, match=r'a dict, takes no .* arguments.* 1: .*\(init, key\)'):
        PjitPartitioner(SIZES, 'fsdp').plan(init(KEY), KEY)


@pytest.mark.parametrize('wrong', ['state', None])
def test_what_is_neither_a_state_nor_a_function(wrong):
    with pytest.raises(ValueError, match='neither a state nor a function that makes one'):
        PjitPartitioner(SIZES, 'fsdp').plan(wrong)


@pytest.mark.parametrize(
    'use, extra, said',
    [
        ('setup', 'run1', "the string 'run1' at extra"),  # a plan replicates it, as flax does
        *((use, object(), 'object at extra') for use in ('plan', 'setup')),
        *((use, abs, 'function abs') for use in ('plan', 'setup')),
    ],
)
def test_a_state_that_holds_other_values_than_arrays(use, extra, said):
    args = [lambda state, batch: state] if use == 'setup' else []
    with pytest.raises(ValueError, match=f'^the state holds .*{said}.*which is not an array'):
        getattr(PjitPartitioner(SIZES, 'fsdp'), use)({**init(KEY), 'extra': extra}, *args)


def test_an_audit_takes_a_state():
    partitioner = PjitPartitioner(SIZES, 'fsdp')
    with pytest.raises(ValueError, match=r'not a Plan: write plan.audit\(\)$'):
        partitioner.audit(partitioner.plan(init, KEY))
    with pytest.raises(ValueError, match=r'not the function init: write partitioner.plan\(init, k'):
        partitioner.audit(init)


@pytest.mark.parametrize(
    'args, said',
    [
        (
            (),
            r'^plan.init takes .* of init, 1 of them, but got 0: write plan.init\(key\)$',
        ),
        ((KEY, KEY), r'1 of them, but got 2: write plan.init\(key\)$'),
        (
            (jnp.zeros(3),),
            r'^plan.init\(key\) was planned for .*key.*float32\[3\].*make the plan again',
        ),
    ],
)
def test_other_arguments_than_planned(args, said):
    plan = PjitPartitioner(SIZES, 'fsdp').plan(init, KEY)
    with pytest.raises(ValueError, match=said):
        plan.init(*args)


def test_the_strings_of_a_module_of_equinox():
    class Named(eqx.Module):
        w: jax.Array
        axis: str = 'batch'

    message = r"returned the string 'batch' at 0/axis, .*eqx.partition\(model, eqx.is_array\)\[0\]"
    with pytest.raises(ValueError, match=message):
        PjitPartitioner(SIZES, 'fsdp').setup(lambda key: (Named(init(key)['w']),), None, KEY)
    with pytest.raises(ValueError, match='axis, which is not an array: keep it outside'):
        PjitPartitioner(SIZES, 'fsdp').setup(lambda key: {'axis': 'batch'}, None, KEY)
