"""T5X's optimizers on top of optax: several of them in one model, and wrapped ones in gin files."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import ModelParamTraversal

from partitioning import unbox
from train.errors import ConfigError
from train.optimizers import as_transformation
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.optimizers import MultiOptimizer, adamw, lion, sgd, with_learning_rate

pytestmark = pytest.mark.core

PARAMS = {'mlp': {'kernel': jnp.ones((3, 4)), 'bias': jnp.ones(4)}, 'norm': {'scale': jnp.ones(4)}}


def steps(tx, params, count=3):
    """The parameters after several updates, with the gradient sin(parameter) + 1."""
    state = tx.init(params)
    for _ in range(count):
        updates, state = tx.update(jax.tree.map(lambda x: jnp.sin(x) + 1, params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.filterwarnings('ignore:.*Traversal:DeprecationWarning')
def test_each_part_has_its_own_optimizer_and_the_rest_stays():
    kernels = ModelParamTraversal(lambda path, x: path.endswith('/kernel') and x.ndim == 2)
    several = MultiOptimizer([(kernels, adamw(0.1, weight_decay=0.5)), ('bias', sgd(0.2))])
    found = steps(as_transformation(with_learning_rate(several, lambda step: 9.0)), PARAMS)
    by_hand = {
        'mlp': {
            'kernel': steps(optax.adamw(0.1, weight_decay=0.5), PARAMS['mlp']['kernel']),
            'bias': steps(optax.sgd(0.2), PARAMS['mlp']['bias']),
        },
        'norm': PARAMS['norm'],
    }
    assert_close(found, by_hand)
    assert not np.allclose(found['mlp']['kernel'], found['mlp']['bias'])


def test_adafactor_in_a_part_knows_the_names_and_has_the_rate_of_the_trainer():
    axes = ('embed', 'layers', 'mlp')
    params = {'a': nn.LogicallyPartitioned(jnp.ones((4, 2, 3)), axes), 'b': jnp.ones(3)}
    adafactor = Adafactor(logical_factor_rules=standard_logical_factor_rules())
    several = MultiOptimizer([('^a', adafactor), ('^b', lion(0.1))])

    def rate(step):
        return 0.1 / (step + 1)

    found = steps(as_transformation(several.optimizer(rate), params), unbox(params))
    alone = as_transformation(adafactor.optimizer(rate), {'a': params['a']})
    assert_close(found['a'], steps(alone, {'a': params['a'].value})['a'])
    assert_close(found['b'], steps(optax.lion(0.1), params['b']))


def test_a_wrapped_chain_in_a_gin_file_equals_optax(load):
    """As in T5X's files for GPUs: evaluated references in a list, each with its own settings."""
    load(
        'from __gin__ import dynamic_registration\n'
        'import optax\n'
        'from t5x import optimizers\n'
        'OPTIMIZER = @optimizers.chain()\n'
        'optimizers.chain.transformations = [@optax.clip(), @optimizers.adamw()]\n'
        'optax.clip.max_delta = 0.5\n'
        'optimizers.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()\n'
        'optax.warmup_cosine_decay_schedule:\n'
        '  init_value = 0.0\n  peak_value = 0.5\n  warmup_steps = 2\n  decay_steps = 10\n'
        'optax.constant_schedule.value = %OPTIMIZER\n'
    )
    tx = gin.get_bindings('optax.constant_schedule')['value']
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.5, 2, 10)
    by_hand = optax.chain(optax.clip(0.5), optax.adamw(rate))
    assert with_learning_rate(tx, lambda step: 9.0) is tx
    assert_close(steps(tx, PARAMS), steps(by_hand, PARAMS))


@pytest.mark.parametrize(
    'pairs, words',
    [
        ([('kernel', sgd(1.0)), ('mlp', sgd(1.0))], ['[0] and [1]', 'mlp/kernel']),
        ([('kernal', sgd(1.0))], ['[0][0] selects no parameter']),
        ([('kernel', optax.adamw)], ['[0][1] is @adamw', 'with the parentheses']),
        ([(3, sgd(1.0))], ['[0][0] is 3', 'ModelParamTraversal']),
        ([sgd(1.0).init], ['[0] is', 'write (traversal, optimizer)']),
    ],
)
def test_parts_that_do_not_fit_are_errors(pairs, words):
    with pytest.raises(ConfigError) as error:
        as_transformation(MultiOptimizer(pairs).optimizer(lambda step: 1.0)).init(PARAMS)
    assert all(word in str(error.value) for word in words)
