"""NaN and Inf in a step: each policy, next to gradient descent by hand in NumPy."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partitioning import PjitPartitioner
from train import Optimizer, TrainConfig, train
from train.checkpoints import CheckpointConfig, complete_steps
from train.config import ConfigError
from train.data import Examples, LocalBatches
from train.objectives import Loss, Objective
from train.reporting.writers import JsonWriter
from train.running.run import prepare

pytestmark = pytest.mark.core

RATE, MOMENTUM, ROWS = 0.05, 0.5, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Objective):
    """Linear regression whose loss or gradient is not finite in some steps.

    The step is recognized by its random key.
    """

    bad_steps: tuple[int, ...] = ()
    part: str = 'loss'

    def init(self, key: jax.Array, batch: Any) -> Any:
        return {'params': {'w': jnp.zeros(4)}, 'counts': {'seen': jnp.zeros(())}}

    def loss(self, params: Any, batch: Any, rng: Any, variables: Any) -> Loss:
        total = jnp.sum((batch['x'] @ params['w'] - batch['y']) ** 2)
        seen = variables['counts']['seen'] + 1
        steps = [jax.random.fold_in(jax.random.key(0), step - 1) for step in self.bad_steps]
        bad = jnp.array(False)
        for key in steps if rng is not None else ():
            bad |= jnp.all(jax.random.key_data(key) == jax.random.key_data(rng))
        if self.part == 'loss':
            total = jnp.where(bad, jnp.nan, total)
        elif self.part == 'gradients':  # the root of 0 has an infinite derivative
            total = total + jnp.sqrt(jnp.where(bad, 0 * params['w'][0], 1.0)) - 1.0
        elif self.part == 'variables':
            seen = jnp.where(bad, jnp.inf, seen)
        return Loss(total, variables={'counts': {'seen': seen}})


def broken(part, bad_update):
    """Gradient descent that breaks its statistics or the parameters at one of its updates."""
    descent = optax.sgd(RATE, momentum=MOMENTUM)

    def update(grads, state, params=None):
        count, inner = state
        updates, inner = descent.update(grads, inner, params)
        value = jnp.where(count + 1 == bad_update, jnp.inf, 0.0)
        if part == 'parameters':
            updates = jax.tree.map(lambda x: x + value, updates)
        else:
            inner = jax.tree.map(lambda x: x + value, inner)
        return updates, (count + 1, inner)

    return optax.GradientTransformation(lambda p: (jnp.int32(0), descent.init(p)), update)


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    return {'x': x, 'y': (x @ [1.0, -2.0, 3.0, 0.5]).astype(np.float32)}


def configure(model_dir, **changes) -> TrainConfig:
    settings: dict[str, Any] = {
        'model_dir': model_dir,
        'objective': Line(),
        'partitioner': PjitPartitioner(layout='data_parallel'),
        'optimizer': optax.sgd(RATE, momentum=MOMENTUM),
        'task': Examples(training=examples()),
        'total_steps': 8,
        'batch_size': ROWS,
        'checkpoints': CheckpointConfig(period=3, when_busy='wait'),
        'writers': (JsonWriter,),
        'log_every': 100,
        'compilation_cache': None,
    }
    return TrainConfig(**settings | changes)


def by_hand(config, steps):
    """The parameters after these steps of gradient descent, in NumPy."""
    batches = LocalBatches(prepare(config).rows, ROWS, range(ROWS))
    w, trace = np.zeros(4), np.zeros(4)
    for step in steps:
        batch = batches[step - 1]
        gradient = 2 * batch['x'].T @ (batch['x'] @ w - batch['y']) / ROWS
        trace = gradient + MOMENTUM * trace
        w = w - RATE * trace
    return w


def assert_weights(state, expected):
    np.testing.assert_allclose(state.params['w'], expected, rtol=1e-4, atol=1e-6)


def read(model_dir, name):
    lines = map(json.loads, (model_dir / 'metrics.jsonl').read_text().splitlines())
    return {record['step']: record[name] for record in lines if name in record}


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'objective': Line(bad_steps=(5,))}, 'the loss is'),
        ({'objective': Line(bad_steps=(5,), part='gradients')}, 'the gradients, the parameters'),
        ({'objective': Line(bad_steps=(5,), part='variables')}, 'the variables are'),
        ({'optimizer': broken('parameters', 5)}, 'the parameters are'),
        ({'optimizer': broken('optimizer state', 5)}, 'the optimizer state is'),
    ],
)
def test_the_first_step_that_is_not_finite_is_named_and_not_saved(tmp_path, changes, words):
    with pytest.raises(FloatingPointError) as error:
        train(configure(tmp_path, **changes))
    assert str(error.value).startswith(words)
    assert 'not finite at step 5;' in str(error.value)
    assert 'resumes from the checkpoint of step 3' in str(error.value)
    assert "TrainConfig.not_finite to 'skip' or 'roll_back'" in str(error.value)
    assert '\n' not in str(error.value)
    assert complete_steps(tmp_path / 'checkpoints') == [3]
    assert read(tmp_path, 'train/loss').keys() == {3}
    config = configure(tmp_path)
    if 'objective' in changes:  # the other states have other arrays
        assert_weights(train(config), by_hand(config, range(1, 9)))


def test_without_a_checkpoint_the_error_says_so(tmp_path):
    with pytest.raises(FloatingPointError, match='at step 2; no checkpoint is saved yet'):
        train(configure(tmp_path, objective=Line(bad_steps=(2,))))


def test_a_state_that_was_not_finite_from_the_start_is_suspected(tmp_path):
    bad = {'optimizer': broken('optimizer state', 2), 'total_steps': 3}
    train(configure(tmp_path, not_finite='ignore', **bad))
    assert complete_steps(tmp_path / 'checkpoints') == [3]
    with pytest.raises(FloatingPointError, match='perhaps the state of step 3 is already not fin'):
        train(configure(tmp_path, **bad | {'total_steps': 4}))


def test_a_skipped_step_changes_nothing_but_the_step(tmp_path, capsys):
    objective = Line(bad_steps=(3, 5, 6))
    config = configure(tmp_path, objective=objective, not_finite='skip', max_skips=2, log_every=4)
    state = train(config)
    assert int(state.step) == 8 and float(state.flax_mutables['counts']['seen']) == 5
    assert_weights(state, by_hand(config, [1, 2, 4, 7, 8]))
    assert read(tmp_path, 'train/skipped') == {3: 1, 5: 1, 6: 1}
    said = capsys.readouterr().out
    assert 'not finite at step 3: its update is skipped\n' in said
    assert 'not finite at step 5: its update is skipped (and 1 more)\n' in said
    assert complete_steps(tmp_path / 'checkpoints') == [3, 6, 8]


def test_an_update_that_breaks_the_optimizer_state_is_skipped_until_the_limit(tmp_path):
    """The optimizer does not count skipped updates, so this one breaks every next update."""
    config = configure(
        tmp_path, optimizer=broken('optimizer state', 5), not_finite='skip', max_skips=3
    )
    words = 'the optimizer state is not finite at step 8, after 3 skipped steps in a row; the same'
    with pytest.raises(FloatingPointError, match=words):
        train(config)
    assert complete_steps(tmp_path / 'checkpoints') == [3, 6]
    state = train(configure(tmp_path, optimizer=broken('', 0), total_steps=6))
    assert_weights(state, by_hand(config, range(1, 5)))


def test_a_run_goes_back_and_passes_over_the_batches_up_to_the_bad_one(tmp_path, capsys):
    settings: Any = {'objective': Line(bad_steps=(5,)), 'not_finite': 'roll_back'}
    config = configure(tmp_path / 'whole', **settings)
    state = train(config)
    assert int(state.step) == 8
    assert_weights(state, by_hand(config, [1, 2, 3, 6, 7, 8]))
    [line] = [s for s in capsys.readouterr().out.splitlines() if 'going back' in s]
    assert (
        'going back to step 3, and on with the batch of step 6; the batches of steps 4 to 5' in line
    )
    assert 'roll-back 1 of at most 3' in line
    assert read(tmp_path / 'whole', 'train/rolled_back_to') == {5: 3}
    assert complete_steps(tmp_path / 'whole/checkpoints') == [3, 6, 8]
    # A run that ends before or after the bad step, and resumes, does the same.
    for name, first in (('before', 3), ('after', 6)):
        train(configure(tmp_path / name, **settings, total_steps=first))
        resumed = train(configure(tmp_path / name, **settings))
        np.testing.assert_array_equal(resumed.params['w'], state.params['w'])
        assert read(tmp_path / name, 'train/loss') == read(tmp_path / 'whole', 'train/loss')


def test_a_schedule_follows_the_updates_and_not_the_steps(tmp_path):
    optimizer = Optimizer(
        transform=optax.sgd, learning_rate=optax.linear_schedule(0.1, 0.02, 8), clip_norm=None
    )
    settings: Any = {'objective': Line(bad_steps=(5,)), 'not_finite': 'roll_back'}
    train(configure(tmp_path, optimizer=optimizer, **settings))
    rates = read(tmp_path, 'train/learning_rate')
    # Steps 3, 6 and 8 are the updates 3, 4 and 6, which begin at 0.1 and fall by 0.01 each.
    assert rates == pytest.approx({3: 0.08, 6: 0.07, 8: 0.05})


@pytest.mark.parametrize(
    'bad_steps, words',
    [
        ((2,), 'at step 2, and there is no checkpoint to go back to; no checkpoint is saved yet'),
        ((8,), r'at step 8, after which no step is left \(total_steps is 8\); the same command'),
        ((4, 5, 6), 'at step 6, after 2 roll-backs to step 3; the same command resumes from the'),
    ],
)
def test_a_run_that_cannot_go_back_stops(tmp_path, bad_steps, words):
    objective = Line(bad_steps=bad_steps)
    with pytest.raises(FloatingPointError, match=words):
        train(configure(tmp_path, objective=objective, not_finite='roll_back', max_roll_backs=2))


@pytest.mark.parametrize('name, value', [('not_finite', 'warn'), ('max_skips', 0)])
def test_malformed_policies_are_errors(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f'{name} is {value!r}'):
        configure(tmp_path, **{name: value})
