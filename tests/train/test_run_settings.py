"""Settings of a run: where it starts and ends, its random numbers, and when it stops early."""

import dataclasses
import gc
import json

import optax
import pytest
from small import records, small_config

from train import EarlyStopping, Optimizer, StopIfNotFinite
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.errors import ConfigError
from train.machine import devices as machine
from train.machine.devices import collect_garbage
from train.running.run import prepare

pytestmark = pytest.mark.core


def checkpoints(model_dir):
    return sorted(int(path.name) for path in (model_dir / 'checkpoints').iterdir())


def losses(model_dir):
    return {r['step']: r['train/loss'] for r in records(model_dir) if 'train/loss' in r}


# The last step.


@pytest.mark.long
def test_relative_steps_count_from_the_step_that_a_run_starts_from(run, tmp_path, finished, capsys):
    directory = finished.copy(tmp_path / 'model', last_step=4)
    assert int(run(directory, total_steps=3, relative_steps=True).step) == 7
    assert 'step 7/7' in capsys.readouterr().out
    assert int(run(directory, total_steps=2, relative_steps=True).step) == 9
    assert int(run(tmp_path / 'new', total_steps=2, relative_steps=True).step) == 2


def test_steps_relative_to_the_checkpoint_of_another_run(run, tmp_path, finished):
    restore = RestoreConfig(path=str(finished.directory))
    state = run(tmp_path / 'tuned', total_steps=2, relative_steps=True, restore=restore)
    assert int(state.step) == 8


# Evaluation before the first step.


def test_a_run_is_evaluated_before_its_first_step(run, tmp_path, finished):
    run(tmp_path / 'new', total_steps=1, evaluate_first=True)
    first = records(tmp_path / 'new')[0]
    assert first['step'] == 0 and first['eval/loss'] == pytest.approx(5.576, abs=0.01)  # log(264)
    directory = finished.copy(tmp_path / 'model', last_step=4)
    run(directory, evaluate_first=True)
    at_4 = [r['eval/loss'] for r in records(directory) if r['step'] == 4 and 'eval/loss' in r]
    assert len(at_4) == 2 and at_4[1] == pytest.approx(at_4[0], rel=1e-6)


def test_a_run_of_no_steps_evaluates_what_it_starts_from(run, tmp_path, finished):
    state = run(
        tmp_path / 'scores', total_steps=0, restore=RestoreConfig(path=str(finished.directory))
    )
    [scores] = records(tmp_path / 'scores')
    last = records(finished.directory)[-1]
    assert int(state.step) == scores['step'] == 6
    assert scores['eval/loss'] == pytest.approx(last['eval/loss'], rel=1e-6)


# Random numbers.


def test_a_resumed_run_repeats_the_numbers_of_another_implementation(run, tmp_path, finished):
    settings = {'prng_impl': 'unsafe_rbg', 'evaluators': {}}
    run(tmp_path / 'whole', **settings)
    run(tmp_path / 'parts', **settings | {'total_steps': 2})
    run(tmp_path / 'parts', **settings)
    whole = losses(tmp_path / 'whole')
    assert losses(tmp_path / 'parts') == whole
    other = losses(finished.directory)  # threefry
    assert whole[1] != other[1] and whole[1] == pytest.approx(other[1], rel=0.1)


def test_a_change_of_the_random_numbers_is_reported(run, tmp_path, finished, capsys):
    directory = finished.copy(tmp_path / 'model', last_step=4)
    run(directory, prng_impl='rbg', seed=1, data_seed=0, evaluators={})
    said = capsys.readouterr().out
    assert 'random_seed changed from 0 to 1: later steps use other random numbers' in said
    assert 'prng_impl changed from None to rbg: later steps use other random numbers' in said
    assert 'different rows' not in said


def test_the_order_of_the_data_has_its_own_seed(tmp_path, texts):
    def rows(**settings):
        run = prepare(small_config(tmp_path, texts, **settings))
        return [run.rows[i]['decoder_input_tokens'].tolist() for i in range(8)]

    assert rows(seed=5) == rows(seed=0, data_seed=5) != rows(seed=0)


def test_a_seed_by_the_time_is_kept_by_a_resumed_run(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('time.time', lambda: 1234567890.5)
    settings = {
        'seed': None,
        'evaluators': {},
        'checkpoints': CheckpointConfig(period=2, when_busy='wait'),
    }
    run(tmp_path / 'parts', **settings, total_steps=2)
    assert 'seed 1234567890, chosen by the time' in capsys.readouterr().out
    monkeypatch.setattr('time.time', lambda: 1444444444.5)
    run(tmp_path / 'parts', **settings, total_steps=4)
    assert 'seed 1234567890, of the earlier run' in capsys.readouterr().out
    recorded = json.loads((tmp_path / 'parts/data.json').read_text())['settings']
    assert recorded['random_seed'] == recorded['seed'] == 1234567890
    run(tmp_path / 'whole', **settings | {'seed': 1234567890}, total_steps=4)
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')


# Stopping early.


@pytest.mark.parametrize(
    'settings, values, ends',
    [
        ({}, [3.0, 2.0, 2.0, 2.0, 9.0], 4),  # 2.0 and 2.0 are no better than the value before
        ({}, [3.0, 4.0, 3.9, 4.0, 4.1], 5),  # 3.9 is better than 4.0, though not than 3.0
        ({}, [1.0, 2.0], None),
        ({'patience': 1}, [1.0], 1),
        ({'patience': 2, 'atol': 0.5}, [3.0, 2.4, 2.0], 3),
        ({'patience': 2, 'atol': 0.5}, [3.0, 2.5], 2),  # exactly the tolerance
        ({'patience': 2, 'rtol': 0.25}, [4.0, 3.1], 2),
        ({'patience': 2, 'rtol': 0.25}, [4.0, 2.9], None),
        ({'patience': 2, 'mode': 'max'}, [1.0, 2.0, 1.5], 3),
        ({'patience': 2, 'mode': 'max', 'atol': 1.0, 'rtol': 0.1}, [-10.0, -7.9, -7.0], 3),
        ({'patience': 2}, [-1.0, -2.0, -1.5], 3),
    ],
)
def test_early_stopping_compares_each_value_with_the_one_before_it(settings, values, ends):
    stopping = EarlyStopping(**settings)
    reasons = [stopping.reason(values[:i]) for i in range(1, len(values) + 1)]
    found = next((i for i, reason in enumerate(reasons, 1) if reason), None)
    assert found == ends
    if ends:
        assert 'eval/loss has not improved (' in reasons[ends - 1]


@dataclasses.dataclass(frozen=True)
class Listed:
    """An evaluator with scores that the test chooses."""

    scores: dict[int, float]
    every: int = 2

    def run(self, state, step):
        return {'score': self.scores[step], 'other': 1.0}


def test_a_run_that_stops_early_is_saved_and_evaluated(run, tmp_path, capsys):
    scores = {2: 5.0, 4: 6.0, 6: 7.0}
    last = Listed({4: 8.0}, every=0)
    state = run(
        tmp_path,
        total_steps=100,
        evaluators={'mine': Listed(scores), 'last': last},
        stop_when=[EarlyStopping(metric='mine/score', patience=2)],
        checkpoints=CheckpointConfig(period=3, when_busy='wait'),
    )
    assert int(state.step) == 4
    assert checkpoints(tmp_path) == [3, 4]
    assert records(tmp_path)[-1] == {'step': 4, 'last/score': 8.0, 'last/other': 1.0}
    said = capsys.readouterr().out
    assert 'step 4: stopping early, because mine/score has not improved (5, 6)' in said


def test_a_training_metric_can_end_a_run(run, tmp_path):
    stop = EarlyStopping(metric='train/loss', mode='max', patience=2)  # the loss falls
    settings = {'evaluators': {}, 'log_every': 3, 'checkpoints': CheckpointConfig(period=0)}
    state = run(tmp_path, total_steps=100, stop_when=[stop], **settings)
    assert int(state.step) == 6


def test_a_score_that_is_not_finite_ends_a_run_before_it_is_saved(run, tmp_path):
    scores = {2: 1.0, 4: float('inf')}
    with pytest.raises(FloatingPointError, match=r'mine/score is inf'):
        run(
            tmp_path,
            evaluators={'mine': Listed(scores)},
            stop_when=[StopIfNotFinite(metric='mine/score')],
        )
    assert checkpoints(tmp_path) == [2]


def test_a_metric_that_is_not_reported_is_an_error(run, tmp_path):
    stop = [EarlyStopping(metric='mine/scoer')]
    with pytest.raises(ConfigError, match=r"'mine/scoer' .*Did you mean 'mine/score'\?"):
        run(tmp_path, evaluators={'mine': Listed({2: 1.0})}, stop_when=stop)


def test_training_may_continue_with_nan(run, tmp_path):
    optimizer = Optimizer(transform=optax.sgd, learning_rate=float('nan'))
    settings = {'optimizer': optimizer, 'evaluators': {}, 'total_steps': 2}
    with pytest.raises(FloatingPointError):
        run(tmp_path / 'a', **settings)
    assert int(run(tmp_path / 'b', **settings, not_finite='ignore').step) == 2


# Python's garbage.


def test_garbage_is_collected_at_its_steps_only(monkeypatch):
    collected = []
    monkeypatch.setattr(machine.gc, 'collect', lambda: collected.append(step))
    with collect_garbage(3) as collect:
        assert not gc.isenabled()
        for step in range(1, 8):
            collect(step)
    assert gc.isenabled() and collected == [3, 6]
    with collect_garbage(0) as collect:
        assert gc.isenabled()
        collect(0)
    assert collected == [3, 6]


@pytest.mark.parametrize(
    'settings, words',
    [
        ({'seed': -1}, 'seed is -1'),
        ({'data_seed': 1.5}, 'data_seed is 1.5'),
        ({'prng_impl': 'rng'}, "'rng': use one of ('threefry2x32', 'rbg', 'unsafe_rbg')"),
        ({'relative_steps': 5}, 'relative_steps is 5: use True or False'),
        ({'collect_garbage_every': -1}, 'collect_garbage_every is -1'),
        ({'stop_when': EarlyStopping()}, "write [EarlyStopping(metric='eval/loss')]"),
        ({'stop_when': [EarlyStopping]}, 'stop_when[0]'),
    ],
)
def test_malformed_settings_are_errors(tmp_path, texts, settings, words):
    with pytest.raises(ConfigError) as error:
        small_config(tmp_path, texts, **settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    'settings, words',
    [
        ({'mode': 'least'}, "use 'min' or 'max'"),
        ({'patience': 0}, 'patience is 0'),
        ({'atol': -1}, 'atol is -1'),
        ({'rtol': None}, 'rtol is None'),
        ({'metric': ''}, "write 'eval/loss'"),
    ],
)
def test_malformed_conditions_are_errors(settings, words):
    with pytest.raises(ConfigError) as error:
        EarlyStopping(**settings)
    assert words in str(error.value)
