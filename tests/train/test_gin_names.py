"""Ordinary lines of gin files work without a flag; the list is complete.

test_t5x_imports.py has the names in T5X's files.
"""

import copy
import importlib
import inspect
import operator

import gin
import jax
import jax.numpy as jnp
import optax
import pytest

from train.gin.configurables import BY_MODULE, matches

pytestmark = pytest.mark.core

DYNAMIC = 'from __gin__ import dynamic_registration\n'
IMPORTS = DYNAMIC + 'import optax\n'

# Each text sets the macro A; the function checks its value.
ORDINARY = {
    'warmup and cosine': (
        'A = @optax.warmup_cosine_decay_schedule()\noptax.warmup_cosine_decay_schedule:\n'
        '  init_value = 0.0\n  peak_value = 0.0001\n  warmup_steps = 1000\n  decay_steps = 2000',
        lambda a: float(a(1000)) == pytest.approx(0.0001),
    ),
    'muon': (
        'A = @one/optax.contrib.muon()\none/optax.contrib.muon.learning_rate = 0.02',
        lambda a: isinstance(a, optax.GradientTransformation),
    ),
    'a singleton': (
        'A = [@s/gin.singleton(), @s/gin.singleton()]\n'
        's/gin.singleton.constructor = @optax.zero_nans',
        lambda a: a[0] is a[1],
    ),
    'jax and flax': (
        'import jax.nn\nimport flax.linen as nn\nfrom flax import nnx\n'
        'A = [@jax.nn.gelu, @nn.gelu, @nn.initializers.normal(), @nn.LayerNorm, @nnx.Linear, '
        '@nnx.initializers.zeros]\nnn.initializers.normal.stddev = 0.0',
        lambda a: a[0](1.0) == a[1](1.0) and not a[2](jax.random.key(0), (2,)).any(),
    ),
    'dtypes': (
        'import jax.numpy as jnp\nA = @jnp.bfloat16',
        lambda a: jnp.zeros(1, a).dtype == 'bfloat16',
    ),
}


@pytest.mark.parametrize('name', ORDINARY)
def test_ordinary_lines_need_no_flag(load, name):
    text, check = ORDINARY[name]
    load(IMPORTS + text + '\n')
    assert check(copy.deepcopy(gin.query_parameter('A/gin.macro.value')))


@pytest.mark.parametrize(
    'text',
    [
        'A = @optax.contrib.schedule_free_adamw()',
        'A = @contrib.muon()',
        'A = @flax.linen.LayerNorm',
        'A = @jax.nn.initializers.normal()',
        'A = [@flax.nnx.Linear, @jax.numpy.float32]',
        'A = @one/gin.singleton()\none/gin.singleton.constructor = @Optimizer',
        'Optimizer.transform = @optax.lion\noptax.lion.b1 = 0.5',
        'import optax\nimport train.optimizers\nA = @adamw',
    ],
)
def test_listed_names_need_no_import(load, text):
    load(text + '\n')


def test_bindings_with_dynamic_registration_have_an_effect(load):
    load(
        f"""
        {DYNAMIC}
        import optax
        import train.optimizers
        train.optimizers.Optimizer.transform = @optax.sgd
        train.optimizers.Optimizer.learning_rate = 0.5
        train.optimizers.Optimizer.clip_norm = None
        optax.sgd.nesterov = True
        optax.sgd.momentum = 0.0
        """
    )
    tx = gin.get_configurable('Optimizer')().build()
    params = {'w': jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params))
    assert updates['w'].tolist() == [-0.5, -0.5]


# The list itself.

# They configure other functions, take `*args`, or need more than gradients and parameters.
OTHERS = {
    'hutchinson_estimator_diag_hessian',
    'inject_hyperparams',
    'inject_stateful_hyperparams',
    'lbfgs',
    'schedule_free_eval_params',
}


def functions(module):
    return {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != '_'}


def test_a_name_is_known_when_all_files_have_been_read(load):
    load('A = 1')
    assert matches('rprop') == ['optax.rprop']


@pytest.mark.parametrize('module', [optax, optax.schedules, optax.contrib])
def test_the_list_has_every_schedule_and_optimizer_of_optax(module):
    wanted = set(functions(module)) - OTHERS
    if module is optax:  # all others are transformations, losses and helpers
        first = {n: [*inspect.signature(getattr(optax, n)).parameters][:1] for n in wanted}
        wanted = {n for n in wanted if n.endswith('schedule') or first[n] == ['learning_rate']}
    assert len(wanted) > 10
    assert wanted <= set(BY_MODULE[module.__name__])


@pytest.mark.parametrize('module', BY_MODULE)
def test_every_listed_name_is_a_public_function_or_class(module):
    home = importlib.import_module(module)
    for name in BY_MODULE[module]:
        assert not any(part.startswith('_') for part in f'{module}.{name}'.split('.'))
        found = operator.attrgetter(name)(home) if hasattr(home, name.split('.')[0]) else None
        # Older versions of the libraries lack some names.
        assert callable(found) or (found is None and module.startswith(('optax', 'flax', 'jax')))
