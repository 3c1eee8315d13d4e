"""When checkpoints are saved, which of them are kept, and what a save that fails leaves behind."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from small import records

from partitioning import TrainState
from train.checkpoints import CheckpointConfig, Checkpoints, complete_steps, folder as module
from train.checkpoints.folder import find_surplus
from train.checkpoints.orbax.files import read_orbax
from train.errors import ConfigError

SECONDS = 120  # Far longer than any save takes.


def state(value=0.0, size=4):
    params = {'kernel': jnp.full((size, 64), value), 'count': jnp.int32(3)}
    return TrainState.create({'params': params}, optax.sgd(0.1))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / 'checkpoints'


@pytest.fixture
def gate(monkeypatch):
    """An event: until it is set, no save comes to its end."""
    event, complete = threading.Event(), module.complete_step

    def complete_step(*args):
        assert event.wait(SECONDS)
        complete(*args)

    monkeypatch.setattr(module, 'complete_step', complete_step)
    yield event
    event.set()


def run_steps(saved, steps, last, gate=None, opens_at=None):
    """Does what the loop of a run does about checkpoints, and returns the steps that it saves."""
    done = []
    for step in steps:
        if step == opens_at:
            gate.set()
            saved.wait()
        if saved.is_due(step, ending=step == last):
            if step == last and gate is not None:
                gate.set()
            saved.save(step, state(step))
            done.append(step)
    saved.close()
    return done


@pytest.mark.parametrize(
    'when_busy, expected', [('later', [2, 7, 12]), ('skip', [2, 8, 12]), ('wait', None)]
)
def test_what_happens_if_an_earlier_save_is_not_finished(folder, gate, when_busy, expected):
    """The save of step 2 ends before step 7. Later ones end at once."""
    saved = Checkpoints(folder, CheckpointConfig(period=2, keep=None, when_busy=when_busy))
    if when_busy == 'wait':
        gate.set()
        expected = [2, 4, 6, 8, 10, 12]
    steps = [*range(1, 9), 12] if when_busy != 'wait' else range(1, 13)
    assert run_steps(saved, steps, 12, gate, opens_at=7) == expected
    assert complete_steps(folder) == expected


def test_steps_that_are_named_are_saved_whatever_happens_before(folder, gate):
    saved = Checkpoints(folder, CheckpointConfig(period=2, steps=[3], keep=None))
    assert saved.is_due(2)
    saved.save(2, state())
    assert saved.is_saving and not saved.is_due(4) and saved.is_due(3)
    assert saved.is_due(5, ending=True)
    gate.set()
    saved.close()


def test_a_synchronous_save_has_ended_when_it_returns(folder):
    saved = Checkpoints(folder, CheckpointConfig(asynchronous=False))
    saved.save(1, state())
    assert complete_steps(folder) == [1] and not saved.is_saving
    saved.close()


@pytest.mark.parametrize(
    'settings, scores, expected',
    [
        ({'keep': None}, {}, []),
        ({'keep': 2}, {}, [10, 20, 30]),
        ({'keep': 1, 'keep_period': 20}, {}, [10, 30]),
        ({'keep': 1, 'keep_best': 1}, {10: 3.0, 20: 1.0, 30: 2.0}, [10, 30, 40]),
        ({'keep': 1, 'keep_best': 2}, {10: 1.0, 30: 1.0, 40: 2.0}, [20, 40]),
        ({'keep': 1, 'keep_best': 1, 'best_mode': 'max'}, {10: 3.0, 20: 1.0}, [20, 30, 40]),
        ({'keep': 1, 'keep_best': 1}, {}, [10, 20, 30, 40]),
    ],
)
def test_which_steps_are_not_kept(settings, scores, expected):
    metric = 'loss' if 'keep_best' in settings else None
    config = CheckpointConfig(**settings, best_metric=metric)
    assert find_surplus([10, 20, 30, 40, 50], config, scores) == expected


def test_the_best_checkpoints_of_a_run_are_kept(run, tmp_path):
    """The scores are those that the run has recorded."""
    best = CheckpointConfig(
        period=2, keep=1, keep_best=1, best_metric='eval/loss', best_mode='max', when_busy='wait'
    )
    run(tmp_path / 'model', checkpoints=best)
    scores = {r['step']: r['eval/loss'] for r in records(tmp_path / 'model') if 'eval/loss' in r}
    worst = max(scores, key=scores.__getitem__)
    assert complete_steps(tmp_path / 'model/checkpoints') == sorted({worst, 6})
    assert worst != 6, 'otherwise the test would show nothing'


def test_a_metric_that_its_evaluator_does_not_have_is_an_error(run, tmp_path):
    best = CheckpointConfig(period=2, keep_best=1, best_metric='eval/los')
    with pytest.raises(ConfigError, match=r"best_metric is 'eval/los', .* 'eval/loss'"):
        run(tmp_path / 'model', checkpoints=best)


def test_a_step_contains_what_describes_the_run(finished):
    """The texts are those in the folder of the run."""
    step = finished.directory / 'checkpoints/4'
    for name in ('plan.json', 'data.json'):
        assert (step / 'run' / name).read_text() == (finished.directory / name).read_text()
    about = Checkpoints(finished.directory / 'checkpoints', CheckpointConfig()).record(4)
    assert (about.step, about.previous, about.pending) == (4, 2, ())
    assert about.versions['jax'] == jax.__version__
    written = [r for r in records(finished.directory) if r['step'] == 4]
    for record in written:
        for name, value in record.items():
            assert name == 'step' or about.scores[name] == pytest.approx(value)


def test_parameters_are_saved_in_another_dtype(folder):
    saved = Checkpoints(folder, CheckpointConfig(dtype='bfloat16'))
    saved.save(1, state(1.01))
    saved.close()
    arrays = read_orbax(folder_of(folder, 1))
    assert arrays['params/kernel'].dtype == jnp.bfloat16
    expected = np.full((4, 64), 1.01, jnp.bfloat16)
    np.testing.assert_array_equal(arrays['params/kernel'].read(), expected)
    assert arrays['params/count'].dtype == np.int32


def folder_of(folder, step):
    return epath.Path(folder) / str(step) / 'state'


@pytest.mark.smoke
def test_plain_orbax_reads_a_checkpoint(folder):
    saved = Checkpoints(folder, CheckpointConfig())
    saved.save(1, state(2.5))
    saved.close()
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / '1/state', state())
    jax.tree.map(np.testing.assert_array_equal, restored, state(2.5))


# Saves that fail.


def test_a_failure_that_nobody_has_asked_for_is_raised_at_the_end(folder):
    (folder / '1').mkdir(parents=True)
    saved = Checkpoints(folder, CheckpointConfig())
    saved.save(1, state())
    with pytest.raises(module.FailedSave, match=r'checkpoints/1 cannot be saved .*move it away'):
        saved.close()


@pytest.mark.parametrize(
    'settings, expected',
    [
        ({'keep_best': 1}, r'best_metric is None: set both'),
        ({'best_metric': 'eval/loss'}, r'keep_best is None .*set both'),
        ({'keep': None, 'keep_period': 10}, r'keep is None.*set keep = 1'),
        ({'keep_period': 0}, r'keep_period is 0: it must be an integer >= 1'),
        ({'when_busy': 'never'}, r"when_busy is 'never': use one of 'later', 'skip', 'wait'"),
        ({'dtype': 'int8'}, r"dtype is 'int8': use one of None, 'float32'"),
        ({'best_mode': 'least'}, r"best_mode is 'least': use one of 'min', 'max'"),
    ],
)
def test_settings_that_cannot_be_honoured(settings, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        CheckpointConfig(**settings)
    assert '\n' not in str(error.value)
