"""A whole run in this process: compiled once, resumed exactly, stopped if the loss is not finite.

Most tests begin with a copy of one finished run of 6 steps.
"""

import shutil
import signal

import jax
import pytest
from small_runs import records

from partitioning import PjitPartitioner, Plan
from partitioning.state import path_str
from train import train as train_module
from train.checkpoints import complete_steps
from train.errors import ConfigError


def assert_equal_states(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.sharding == b.sharding
        assert (jax.device_get(a) == jax.device_get(b)).all()


@pytest.fixture
def during_step(monkeypatch):
    """Calls a function when a step of the run reports its metrics; returns how to undo it."""

    def during_step(step, action):
        def report(self, current, *args):
            if current == step:
                action()

        monkeypatch.setattr(train_module.RunConsole, 'step', report)
        return monkeypatch.undo

    return during_step


@pytest.mark.smoke
def test_a_run_with_evaluations_and_checkpoints_traces_the_model_and_the_step_once(finished):
    assert int(finished.state.step) == 6
    assert finished.traces == ['init', 'train step']
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(finished.state.params))
    assert complete_steps(finished.directory / 'checkpoints') == [2, 4, 6]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_resumes_exactly(
    run, finished, tmp_path, during_step, number
):
    handler = signal.getsignal(number)  # In background jobs of a shell, the handler ignores Ctrl-C.
    undo = during_step(3, lambda: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'model', 'CHECKPOINT_PERIOD=0')
    # The signal arrives after step 3 has looked for it, so step 4 is the last.
    assert complete_steps(tmp_path / 'model/checkpoints') == [4]
    assert signal.getsignal(number) is handler
    undo()
    assert_equal_states(run(tmp_path / 'model'), finished.state)
    assert records(tmp_path / 'model') == records(finished.directory)


def test_an_error_during_a_step_does_not_stop_a_save_that_has_begun(run, tmp_path, during_step):
    def interrupt():
        raise KeyboardInterrupt

    during_step(3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'model')
    assert complete_steps(tmp_path / 'model/checkpoints') == [2]


def test_a_run_resumes_on_another_mesh(run, finished, tmp_path):
    model_dir = finished.copy(tmp_path / 'model', last_step=4)
    state = run(model_dir, 'NUM_PARTITIONS=4')
    assert dict(jax.tree.leaves(state.params)[0].sharding.mesh.shape) == {'data': 2, 'model': 4}
    one, two = records(finished.directory), records(model_dir)
    assert len(one) == len(two)
    assert one[-1]['eval/loss'] == pytest.approx(two[-1]['eval/loss'], rel=1e-5)


def test_the_plan_of_a_run_lays_out_another(run, finished, tmp_path):
    """The plan overrides rules that would replicate every array."""
    file = finished.directory / 'plan.json'
    planned = {row.path: row.spec for row in Plan.load(file).rows}
    held = jax.tree_util.tree_leaves_with_path(finished.state)
    assert planned.keys() == {path_str(path) for path, _ in held}
    for path, x in held:
        spec = jax.sharding.NamedSharding(x.sharding.mesh, planned[path_str(path)])
        assert x.sharding.is_equivalent_to(spec, x.ndim)
    rules = [(name, None) for name in ('vocab', 'heads', 'kv_heads', 'mlp', 'embed', 'kv')]
    rules += [('batch', 'data'), ('length', None), ('layers', None)]
    state = run(
        tmp_path / 'model',
        'TRAIN_STEPS=2',
        f'PjitPartitioner.logical_axis_rules={rules}',
        'PjitPartitioner.plan=@load_plan()',
        f"load_plan.path='{file}'",
    )
    for a, b in zip(jax.tree.leaves(finished.state), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    [one] = [r for r in records(finished.directory) if r['step'] == 2 and 'eval/loss' in r]
    assert one['eval/loss'] == pytest.approx(records(tmp_path / 'model')[-1]['eval/loss'], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(run, finished, tmp_path):
    model_dir = finished.copy(tmp_path / 'model', last_step=2)
    with pytest.raises(FloatingPointError, match=r'at step \d+ .*checkpoint.* step 2\)'):
        run(model_dir, 'create_learning_rate_scheduler.base_learning_rate=1e30')
    assert complete_steps(model_dir / 'checkpoints') == [2]


def test_incomplete_checkpoints_are_skipped_and_saved_again(run, finished, tmp_path, capsys):
    model_dir = finished.copy(tmp_path / 'model')
    checkpoints = model_dir / 'checkpoints'
    (checkpoints / '6/_CHECKPOINT_METADATA').unlink()
    (checkpoints / '9').mkdir()
    assert_equal_states(run(model_dir), finished.state)
    assert 'resumed from step 4' in capsys.readouterr().out
    assert complete_steps(checkpoints)[-2:] == [4, 6]
    assert records(model_dir) == records(finished.directory)


def test_a_checkpoint_without_its_arrays_is_an_error_with_a_hint(run, finished, tmp_path):
    model_dir = finished.copy(tmp_path / 'model')
    shutil.rmtree(model_dir / 'checkpoints/6/state')
    with pytest.raises(ConfigError, match=r'checkpoints/6 is damaged .*delete it'):
        run(model_dir, 'TRAIN_STEPS=7')


def test_metrics_after_the_newest_checkpoint_are_dropped(run, finished, tmp_path, capsys):
    model_dir = finished.copy(tmp_path / 'model', last_step=0)
    run(model_dir, 'TRAIN_STEPS=1')
    dropped = len(records(finished.directory))
    assert f'dropped {dropped} metrics records after step 0' in capsys.readouterr().out
    assert [r['step'] for r in records(model_dir)] == [1, 1]


@pytest.mark.parametrize(
    'change, message',
    [
        ('train.model=@Transformer', r'train\.model .*@Transformer\(\)'),
        ('train.sample=@SampleConfig', r'train\.sample .*@SampleConfig\(\)'),
        ('train.optimizer=@optax.sgd', r'train\.optimizer .* Optimizer'),
        ('Optimizer.transform=3', r'Optimizer\.transform is 3'),
        ('Optimizer.clip_norm=-1.0', r'Optimizer\.clip_norm is -1\.0'),
        ('TransformerConfig.dropout_rate=-0.5', r'dropout_rate is -0\.5'),
        ('SampleConfig.temperature=-1.0', r'temperature is -1\.0'),
        ('SampleConfig.length=-1', 'length is -1'),
        ('SampleConfig.length=1', 'length is 1'),
        ('train.seed=-1', 'seed is -1'),
        ('train.seed=None', 'seed is None'),
        ('train.log_period=True', 'log_period is True'),
        ('train.log_period=0', 'log_period is 0'),
        ('train.eval_tokens=0', 'eval_tokens is 0'),
        ('train.eval_period=-1', 'eval_period is -1'),
        ("train.eval_tasks=['a']", r'train\.eval_tasks is a list'),
        ('train.num_microbatches=3', 'batch_size 8 .* 3 microbatches .* 4: use a multiple of 12'),
        ('CheckpointConfig.keep=0', 'keep is 0'),
        ('CheckpointConfig.period=-1', 'period is -1'),
        ('SEQUENCE_LENGTH=0', 'sequence_length is 0'),
        ('TRAIN_STEPS=0.5', r'total_steps is 0\.5'),
        ('create_learning_rate_scheduler.steps_per_cycle=0', r'steps_per_cycle \(0\)'),
        ("MODEL_DIR='gs://bucket/run'", 'MODEL_DIR .gs://bucket/run. must be'),
        ("MODEL_DIR=''", 'MODEL_DIR'),
        ("PjitPartitioner.logical_axis_rules=[('a', 'b', 'c')]", r"\('a', 'b', 'c'\)"),
        ('PjitPartitioner.params_on_devices=False', 'params_on_devices is False'),
        ("PjitPartitioner.backend='quark'", 'no mesh: Unknown backend'),
        (
            'PjitPartitioner.num_partitions=None\nPjitPartitioner.mesh=@MeshConfig()\n'
            "MeshConfig.axes={'data': -1, 'model': 2}\nMeshConfig.axis_types='explicit'",
            'Explicit.* need Auto axes',
        ),
    ],
)
def test_a_bad_setting_is_an_error_before_anything_is_written(
    run, tmp_path, monkeypatch, change, message
):
    def compile_nothing(*args):
        raise AssertionError(f'{change} is not an error')

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PjitPartitioner, 'compile', compile_nothing)
    before = sorted(tmp_path.rglob('*'))
    sample = ['train.sample=@SampleConfig()'] if change.startswith('SampleConfig') else []
    # gin re-raises an error as a subclass of its type.
    with pytest.raises(ValueError, match=message):
        run(tmp_path / 'model', *sample, *change.splitlines())
    assert sorted(tmp_path.rglob('*')) == before
