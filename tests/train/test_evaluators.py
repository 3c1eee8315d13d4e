"""Evaluators, hooks, writers and traces of a run on examples from memory."""

import dataclasses
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import records

from partitioning import PjitPartitioner
from train import HeldOut, Objective, Samples, Supervised, TrainConfig, train
from train.checkpoints import CheckpointConfig
from train.data import Examples
from train.errors import ConfigError
from train.evaluators.evaluator import prepare_evaluators
from train.reporting.console import RunConsole

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings('error:Explicitly requested')]

CLASSES = 3


def examples(count, seed):
    """float64 and int64 arrays, as numpy makes them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4))
    return {'x': x, 'y': np.abs(x).argmax(1) % CLASSES}


TRAINING, HELD_OUT, OTHER = examples(40, 0), examples(11, 1), examples(5, 2)


def digits(model_dir, **changes):
    """The settings of a run of 5 steps."""
    settings = {
        'model_dir': model_dir,
        'objective': Supervised(
            model=nn.Dense(CLASSES),
            inputs='x',
            targets='y',
            row_loss=optax.softmax_cross_entropy_with_integer_labels,
            row_metrics={'accuracy': lambda logits, y: logits.argmax(-1) == y},
        ),
        'partitioner': PjitPartitioner(layout='fsdp'),
        'optimizer': optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
        'task': Examples(training=TRAINING, held_out=HELD_OUT),
        'total_steps': 5,
        'batch_size': 8,
        'checkpoints': CheckpointConfig(period=0),
        'log_every': 2,
    }
    return TrainConfig(**settings | changes)


@dataclasses.dataclass(frozen=True)
class Norm:
    """An evaluator of users, which needs no preparation."""

    every: int = 3

    def run(self, state, step):
        return {'kernel': jnp.linalg.norm(state.params['kernel'])}


@dataclasses.dataclass(frozen=True)
class Count:
    """An evaluator that reads its own task."""

    task: Any = None
    every: int = 0
    found: int = 0

    def prepare(self, run, name):
        return dataclasses.replace(self, found=len(run.evaluated[name].evaluation().rows))

    def run(self, state, step):
        return {'rows': self.found}


class Recorder:
    """A metric writer of users, which keeps the records of all runs."""

    records: list
    closed = 0

    def __init__(self, directory, resumed_step):
        self.where = directory, resumed_step

    def write(self, step, scalars):
        type(self).records.append((step, dict(scalars)))

    def close(self):
        type(self).closed += 1


def scores_of(params, data):
    """The scores of the model, by numpy."""
    kernel, bias = (np.asarray(params[name], np.float64) for name in ('kernel', 'bias'))
    logits = data['x'] @ kernel + bias
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = -np.take_along_axis(log_p, data['y'][:, None], 1).mean()
    return {'loss': loss, 'accuracy': (logits.argmax(1) == data['y']).mean()}


@pytest.mark.smoke
def test_a_run_with_evaluators_hooks_writers_and_a_trace(tmp_path, capsys, monkeypatch, traces):
    monkeypatch.setattr(Recorder, 'records', [], raising=False)
    seen, traced = [], {}
    other = Examples(training=TRAINING, held_out=OTHER)
    state = train(
        digits(
            tmp_path,
            evaluators={
                'eval': HeldOut(every=2),
                'other': HeldOut(task=other),
                'few': HeldOut(limit=3),
                'norm': Norm(),
                'count': Count(task=other),
            },
            hooks=[
                lambda state, step, m: seen.append((step, int(state.step), float(m['loss']))),
                lambda state, step, m: traced.update({step: len(traces)}),
            ],
            writers=[Recorder],
            profile_steps=(2, 3),
        )
    )
    # Hooks run after each step, and their metrics are those that are written.
    assert [(step, done) for step, done, _ in seen] == [(n, n) for n in range(1, 6)]
    losses = {step: loss for step, _, loss in seen}
    written = {step: r['train/loss'] for step, r in Recorder.records if 'train/loss' in r}
    assert written == {step: losses[step] for step in (2, 3, 4, 5)}, 'log_every, or evaluated'
    rates = [r['train/learning_rate'] for _, r in Recorder.records if 'train/loss' in r]
    assert rates == pytest.approx([0.05] * 4), 'from the state of inject_hyperparams'

    scores = {step: r for step, r in Recorder.records if 'train/loss' not in r}
    assert {step: sorted({name.split('/')[0] for name in r}) for step, r in scores.items()} == {
        2: ['eval'],
        3: ['norm'],
        4: ['eval'],
        5: ['count', 'eval', 'few', 'norm', 'other'],
    }
    first = {name: values[:3] for name, values in HELD_OUT.items()}
    expected = {
        f'{name}/{score}': value
        for name, data in (('eval', HELD_OUT), ('other', OTHER), ('few', first))
        for score, value in scores_of(state.params, data).items()
    }
    expected |= {'norm/kernel': np.linalg.norm(state.params['kernel']), 'count/rows': 5}
    assert scores[5] == pytest.approx(expected, rel=1e-5)
    assert Recorder.closed == 1
    assert traces == [tmp_path / 'profile']
    assert traced == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}, 'the trace ends after step 3'
    output = capsys.readouterr().out
    assert 'step 5: count: rows' not in output and 'step 3: norm: kernel ' in output
    assert 'training on 40 examples (800 bytes), 11 examples held out' in output
    assert 'step 4/5  loss' in output and 'rows/s' in output and 'lr 0.05' in output


@dataclasses.dataclass(frozen=True)
class Square(Objective):
    """An objective of users, which may ignore the weights of the rows."""

    weigh: Any

    def init(self, key, batch):
        return {'params': {'w': jnp.zeros((8,))}}

    def loss(self, params, batch, rng, variables):
        return jnp.sum(self.weigh(jnp.mean(params['w']) - batch['y'], batch) ** 2)


def test_fillers_of_the_last_batch_need_the_weights_of_rows(tmp_path):
    ignoring, weighing = (Square(weigh) for weigh in (lambda e, b: e, weighted))
    with pytest.raises(ConfigError) as error:
        train(digits(tmp_path, objective=ignoring))
    for words in ('eval: 11 held-out rows', 'batches of 8', "batch['row_weights']", 'out 8 rows'):
        assert words in str(error.value)
    assert not list(tmp_path.iterdir())
    config = digits(tmp_path, objective=weighing, total_steps=1)
    state = train(config)
    error = float(state.params['w'].mean()) - HELD_OUT['y']
    assert records(tmp_path)[-1]['eval/loss'] == pytest.approx((error**2).mean(), rel=1e-5)
    even = Examples(training=TRAINING, held_out=examples(8, 3))
    train(digits(tmp_path / 'even', objective=ignoring, task=even, total_steps=1))


@jax.jit
def weighted(errors, batch):
    return errors * batch.get('row_weights', 1.0)


@pytest.mark.parametrize('found', [3, {'a': 'b'}, {'a': np.zeros(2)}, None])
def test_an_evaluator_returns_a_dict_of_numbers(found):
    bad = types.SimpleNamespace(every=1, run=lambda state, step: found)
    run = types.SimpleNamespace(evaluators={'bad': bad}, console=RunConsole())
    [prepared] = prepare_evaluators(run).values()
    with pytest.raises(ConfigError, match=r"evaluator 'bad' returns .*: .* a dict of numbers"):
        prepared.run(None, 1)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'evaluators': {'eval': HeldOut(task=Examples(training=TRAINING))}}, 'no held-out examp'),
        ({'evaluators': {'samples': Samples()}}, "'samples' samples text, .*Supervised: remove it"),
        ({'sequence_length': 8}, 'sequence_length is 8, but examples have no tokens'),
    ],
)
def test_evaluators_that_do_not_fit_the_run(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        train(digits(tmp_path, **changes))
    assert '\n' not in str(error.value)
    assert not list(tmp_path.iterdir())
