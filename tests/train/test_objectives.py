"""Objectives of users: any model with a loss of rows, or a loss of their own."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small import Steps

from train import Loss, NextToken, Objective, Supervised
from train.errors import ConfigError
from train.objectives import as_model, compute_loss
from train.objectives.nnx_model import AuxiliaryLoss, Metric

pytestmark = pytest.mark.core

ROWS, WIDTH, MOMENTUM = 16, 4, 0.75


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(2.0, 3.0, (ROWS, WIDTH)).astype(np.float32)
    return {'x': x, 'y': x.sum(1)}


class Linen(nn.Module):
    """Normalizes, drops, and adds up its inputs. The mean square of its outputs is a loss too."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, momentum=MOMENTUM)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        y = nn.Dense(2)(x).sum(1)
        self.sow('losses', 'square', jnp.mean(jnp.square(y)))
        self.sow('metrics', 'size', jnp.array([1.0, 3.0]))
        self.sow('metrics', 'size', jnp.max(jnp.abs(y)))
        self.sow('intermediates', 'y', y)
        return y


class Nnx(nnx.Module):
    """The same model in nnx."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, momentum=MOMENTUM, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x):
        y = self.dense(self.dropout(self.norm(x))).sum(1)
        self.sow(AuxiliaryLoss, 'square', jnp.mean(jnp.square(y)))
        self.sow(Metric, 'size', jnp.array([1.0, 3.0]))
        self.sow(Metric, 'size', jnp.max(jnp.abs(y)))
        self.sow(nnx.Intermediate, 'y', y)
        return y


MODELS = {'linen': Linen(), 'nnx': Nnx}


def square_error(y, batch):
    return (y - batch['y']) ** 2


def supervised(model, **changes):
    metrics = {'is_close': lambda y, batch: jnp.abs(y - batch['y']) < 2.0}
    return Supervised(
        **{'model': model, 'inputs': 'x', 'row_loss': square_error, 'row_metrics': metrics}
        | changes
    )


def loss_of(objective, variables, batch, rng=None):
    others = {name: value for name, value in variables.items() if name != 'params'}
    return compute_loss(objective, variables['params'], batch, rng, others)


@pytest.fixture(params=MODELS)
def objective(request):
    return supervised(MODELS[request.param])


def arrays_of(variables):
    """The arrays of a tree, by the names of their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def named(arrays, word):
    [found] = [array for name, array in arrays.items() if word in name]
    return found


@pytest.mark.parametrize('microbatches', [1, 2])
def test_batch_statistics_are_those_of_numpy(objective, microbatches):
    steps = Steps(objective=objective, batch=batch, microbatches=microbatches, layout='fsdp')
    steps.losses(3)
    mean, var = np.zeros(WIDTH), np.ones(WIDTH)
    for step in range(3):
        for part in range(microbatches):
            x = batch(step)['x'][part::microbatches].astype(np.float64)
            mean = MOMENTUM * mean + (1 - MOMENTUM) * x.mean(0)
            var = MOMENTUM * var + (1 - MOMENTUM) * x.var(0)
    found = arrays_of(steps.state.flax_mutables)
    assert len(found) == 2, 'what the model sows is not part of the state'
    np.testing.assert_allclose(named(found, 'mean'), mean, rtol=1e-5)
    np.testing.assert_allclose(named(found, 'var'), var, rtol=1e-5)


def test_an_evaluation_has_no_dropout_and_uses_the_running_statistics(objective):
    data = batch(0)
    variables = objective.init(jax.random.key(0), data)
    arrays = arrays_of(variables)
    assert named(arrays, 'mean').tolist() == [0] * WIDTH
    y = (data['x'] / np.sqrt(1 + 1e-5)) @ named(arrays, 'kernel').sum(1)
    error = (y - data['y']) ** 2
    total, sums, changed = loss_of(objective, variables, data)
    # The auxiliary loss is a mean over the batch, and the total is a sum.
    auxiliary = (y**2).mean() * ROWS
    assert float(total) == pytest.approx(error.sum() + auxiliary, rel=1e-5)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {
            'weight': ROWS,
            'loss': error.sum(),
            'is_close': (np.abs(y - data['y']) < 2).sum(),
            'auxiliary_loss': auxiliary,
            'size': (1 + 3 + np.abs(y).max()) / 3 * ROWS,
        },
        rel=1e-5,
    )
    assert named(arrays_of(changed), 'mean').tolist() == [0] * WIDTH
    weighted = {**data, 'row_weights': np.arange(ROWS) < 5}
    sums = loss_of(objective, variables, weighted).sums
    assert (float(sums['weight']), float(sums['loss'])) == pytest.approx((5, error[:5].sum()))


def test_a_metric_of_the_model_and_of_the_objective(objective):
    twice = dataclasses.replace(objective, row_metrics={'size': square_error})
    with pytest.raises(ConfigError, match="the model sows a metric 'size', which the objective"):
        loss_of(twice, objective.init(jax.random.key(0), batch(0)), batch(0))


def test_dropout_is_a_function_of_the_key(objective):
    variables = objective.init(jax.random.key(0), batch(0))
    one, again, two = (
        float(loss_of(objective, variables, batch(0), jax.random.key(i)).total) for i in (1, 1, 2)
    )
    assert one == again != two


def test_rows_with_several_values_and_several_inputs():
    class Sum(nn.Module):
        def __call__(self, x, y):
            return x + y[:, None]

    own = supervised(Sum(), inputs=['x', 'y'], row_loss=lambda out, batch: out**2, row_metrics={})
    data = batch(1)
    expected = ((data['x'] + data['y'][:, None]) ** 2).mean(1).sum()
    assert float(compute_loss(own, {}, data, None, {}).total) == pytest.approx(expected, rel=1e-5)


# The user's own objective.


@dataclasses.dataclass(frozen=True)
class Mean(Objective):
    """Finds the mean of a number. After one step of SGD with rate 0.5 it is exact."""

    result: Any = lambda total, size: total

    def init(self, key, batch):
        return {'params': {'w': jnp.zeros(())}}

    def loss(self, params, batch, rng, variables):
        errors = params['w'] - batch['y']
        return self.result(jnp.sum(errors**2), jnp.sum(jnp.abs(errors)))


@pytest.mark.parametrize(
    'result',
    [
        lambda total, size: total,
        lambda total, size: (total, {'size': size}),
        lambda total, size: Loss(3 * total, {'size': size, 'loss': total, 'weight': 3.0 * ROWS}),
    ],
)
def test_a_loss_may_be_a_number_a_tuple_or_a_loss(result):
    steps = Steps(objective=Mean(result), batch=batch, tx=optax.sgd(0.5), layout='fsdp')
    y = batch(0)['y']
    state, metrics = steps.step(steps.state, batch(0))
    assert float(state.params['w']) == pytest.approx(y.mean(), rel=1e-6)
    weight = 3 if isinstance(result(0.0, 0.0), Loss) else 1
    assert float(metrics['loss']) == pytest.approx((y**2).mean() / weight, rel=1e-6)
    if 'size' in metrics:
        assert float(metrics['size']) == pytest.approx(np.abs(y).mean() / weight, rel=1e-6)


class Random(Mean):
    """An objective that reports random numbers."""

    def loss(self, params, batch, rng, variables):
        number = jax.random.uniform(rng) * (params['w'] + 1)
        return number, {'number': number, 'square': number**2, 'weight': 1.0}


def test_each_microbatch_has_its_own_random_numbers():
    steps = Steps(objective=Random(), batch=batch, layout='fsdp', microbatches=2, tx=optax.sgd(0.0))
    _, metrics = steps.step(steps.state, batch(0))
    assert metrics['square'] - metrics['number'] ** 2 > 1e-3, 'the variance of two numbers'


def test_a_loss_that_is_not_a_scalar():
    per_row = Mean(lambda total, size: (total, {'sizes': jnp.ones(3)}))
    message = r'Mean.loss returns sizes with the shape \(3,\): it must be a scalar; sum it'
    with pytest.raises(ValueError, match=message):
        compute_loss(per_row, {'w': jnp.zeros(())}, batch(0), None, {})


# Models.


@pytest.mark.parametrize(
    'argument, when_training',
    [
        *dict.fromkeys(('train', 'training', 'is_training', 'enable_dropout'), True).items(),
        *dict.fromkeys(('deterministic', 'use_running_average'), False).items(),
    ],
)
def test_a_model_is_told_whether_it_trains(argument, when_training):
    class Mode(nn.Module):
        def __call__(self, x, **mode):
            return mode[argument]

    own = {'self': None, 'x': None}
    exec(f'def call(self, x, {argument}=None): return {argument}', own)
    Mode.__call__ = own['call']
    for rng in (None, jax.random.key(0)):
        told = as_model(Mode()).apply({'params': {}}, rng, jnp.ones(2)).outputs
        assert told is ((rng is not None) == when_training)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: supervised(dict), 'the model is the class dict'),
        (lambda: supervised(Linen), r'the model is the class Linen: .*such as Mlp\(\)'),
        (lambda: supervised(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), 'of type Linear: .*lambda rngs'),
        (lambda: supervised(3), 'the model is of type int: '),
        (lambda: NextToken(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0))), 'of type Linear: '),
        (lambda: supervised(Linen(), row_loss=None), 'row_loss is None: it must be a function'),
        (lambda: supervised(Linen(), row_metrics={'a': 'b'}), "Supervised: a is 'b'"),
        (
            lambda: supervised(Linen(), inputs='image').init(jax.random.key(0), batch(0)),
            "no array 'image'; it has x, y",
        ),
        (
            lambda: compute_loss(
                supervised(Linen(), row_loss=lambda y, batch: jnp.mean(y)),
                *(Linen().init(jax.random.key(0), batch(0)['x'])['params'], batch(0), None),
                {'batch_stats': {'BatchNorm_0': {'mean': np.zeros(4), 'var': np.ones(4)}}},
            ),
            r'row_loss returns an array of shape \(\) for a batch of 16 rows: return one value per',
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert '\n' not in str(error.value)
