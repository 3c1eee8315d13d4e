"""A whole run, in this process: compiled once, resumed exactly, stopped when the loss is lost."""

import os
import shutil
import signal

import jax
import pytest
from small_runs import records

from partitioning.plan import load_plan
from partitioning.state import path_str
from train import train as train_module
from train.errors import ConfigError


def test_the_step_is_traced_once_in_a_run_with_evaluations_and_checkpoints(
    run, tmp_path, monkeypatch
):
    traces = []
    make = train_module.make_train_step

    def counted(*args, **kwargs):
        step = make(*args, **kwargs)
        return lambda *a: traces.append('train step') or step(*a)

    monkeypatch.setattr(train_module, 'make_train_step', counted)
    state = run(tmp_path / 'model')
    assert int(state.step) == 6
    assert traces == ['train step']
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(run, tmp_path):
    straight = run(tmp_path / 'straight')
    run(tmp_path / 'interrupted', 'TRAIN_STEPS=3')
    resumed = run(tmp_path / 'interrupted')
    one, two = records(tmp_path / 'straight'), records(tmp_path / 'interrupted')
    # The interrupted run evaluated at its end, after step 3, too.
    assert [r for r in two if not (r['step'] == 3 and 'eval/loss' in r)] == one
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        assert a.sharding == b.sharding
        assert (jax.device_get(a) == jax.device_get(b)).all()


def test_resuming_on_another_mesh(run, tmp_path):
    run(tmp_path / 'model', 'TRAIN_STEPS=4')
    run(tmp_path / 'straight')
    state = run(tmp_path / 'model', 'NUM_PARTITIONS=4')
    assert dict(jax.tree.leaves(state.params)[0].sharding.mesh.shape) == {'data': 2, 'model': 4}
    one, two = records(tmp_path / 'straight'), records(tmp_path / 'model')
    assert one[-1]['eval/loss'] == pytest.approx(two[-1]['eval/loss'], rel=1e-5)


def test_the_plan_of_a_run_lays_out_another(run, tmp_path):
    """The parameters and what the optimizer keeps of them, whatever the rules of the other say."""
    first = run(tmp_path / 'first', 'TRAIN_STEPS=2')
    file = tmp_path / 'first' / 'plan.json'
    planned = {row.path: row.spec for row in load_plan(file).arrays}
    held = jax.tree_util.tree_leaves_with_path(first)
    assert planned.keys() == {path_str(path) for path, _ in held}
    for path, x in held:
        spec = jax.sharding.NamedSharding(x.sharding.mesh, planned[path_str(path)])
        assert x.sharding.is_equivalent_to(spec, x.ndim)
    rules = [(name, None) for name in ('vocab', 'heads', 'kv_heads', 'mlp', 'embed', 'kv')]
    rules += [('batch', 'data'), ('length', None), ('layers', None)]
    changes = ['TRAIN_STEPS=2', f'PjitPartitioner.logical_axis_rules={rules}']
    plan = ['PjitPartitioner.plan=@load_plan()', f"load_plan.path='{file}'"]
    whole = run(tmp_path / 'whole', *changes)
    second = run(tmp_path / 'second', *changes, *plan)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(whole.params))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    one, two = records(tmp_path / 'first'), records(tmp_path / 'second')
    assert one[-1]['eval/loss'] == pytest.approx(two[-1]['eval/loss'], rel=1e-5)


def test_a_lost_loss_stops_the_run_and_keeps_the_good_checkpoint(run, tmp_path):
    model_dir = tmp_path / 'model'
    run(model_dir, 'TRAIN_STEPS=2')
    with pytest.raises(FloatingPointError, match=r'step \d+ \(the checkpoint of step 2 stays\)'):
        run(
            model_dir,
            'create_learning_rate_scheduler.base_learning_rate=1e30',
            'TRAIN_STEPS=9',
        )
    assert [p.name for p in (model_dir / 'checkpoints').iterdir()] == ['2']


def test_a_checkpoint_of_another_model_is_refused(run, tmp_path):
    run(tmp_path / 'model', 'TRAIN_STEPS=1')
    with pytest.raises(ValueError, match=r'mlp/down: \(1, 64, 32\) float32 in the checkpoint'):
        run(tmp_path / 'model', 'TransformerConfig.mlp_dim=128')


def test_a_directory_that_is_no_checkpoint_is_passed_over(run, tmp_path):
    run(tmp_path / 'model', 'TRAIN_STEPS=2')
    (tmp_path / 'model/checkpoints/5').mkdir()
    state = run(tmp_path / 'model', 'TRAIN_STEPS=3')
    assert int(state.step) == 3
    assert records(tmp_path / 'model')[-1]['step'] == 3


def test_a_damaged_checkpoint_is_passed_over_and_saved_again(run, tmp_path, capsys):
    run(tmp_path / 'model', 'TRAIN_STEPS=4')
    checkpoints = tmp_path / 'model/checkpoints'
    (checkpoints / '4/_CHECKPOINT_METADATA').unlink()
    run(tmp_path / 'model', 'TRAIN_STEPS=4')
    assert 'resumed from step 2' in capsys.readouterr().out
    run(tmp_path / 'model', 'TRAIN_STEPS=5')
    assert 'resumed from step 4' in capsys.readouterr().out


def test_a_checkpoint_without_its_arrays_says_what_to_do(run, tmp_path):
    run(tmp_path / 'model', 'TRAIN_STEPS=2')
    shutil.rmtree(tmp_path / 'model/checkpoints/2/state')
    with pytest.raises(ConfigError, match=r'checkpoints/2 is damaged; delete it'):
        run(tmp_path / 'model')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_at_hand_which_is_saved(
    run, tmp_path, monkeypatch, number
):
    def interrupted(self, step, *args):
        if step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)  # a shell's background jobs ignore Ctrl-C
    monkeypatch.setattr(train_module.RunConsole, 'step', interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'model', 'CHECKPOINT_PERIOD=0')
    [saved] = [int(path.name) for path in (tmp_path / 'model/checkpoints').iterdir()]
    assert saved in (3, 4), 'the signal may come when step 3 has been asked already'
    monkeypatch.undo()
    assert signal.getsignal(number) is before
    assert int(run(tmp_path / 'model').step) == 6


def test_what_stops_a_run_does_not_stop_a_save_that_has_begun(run, tmp_path, monkeypatch):
    def interrupted(self, step, *args):
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_module.RunConsole, 'step', interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'model')
    names = [path.name for path in (tmp_path / 'model/checkpoints').iterdir()]
    assert names == ['2']
    monkeypatch.undo()
    assert int(run(tmp_path / 'model').step) == 6


def test_metrics_of_a_run_whose_checkpoints_are_gone_are_dropped_and_that_is_said(
    run, tmp_path, capsys
):
    run(tmp_path / 'model', 'TRAIN_STEPS=2')
    shutil.rmtree(tmp_path / 'model/checkpoints')
    run(tmp_path / 'model', 'TRAIN_STEPS=2')
    assert 'dropped 3 records of metrics after step 0' in capsys.readouterr().out
    assert [r['step'] for r in records(tmp_path / 'model')] == [1, 2, 2]


@pytest.mark.parametrize(
    'change, message',
    [
        ('train.model=@Transformer', r'train\.model is .*write @Transformer\(\)'),
        ('train.sample=@SampleConfig', r'train\.sample is .*write @SampleConfig\(\)'),
        ('train.optimizer=@optax.sgd', r'train\.optimizer is .*, no object of Optimizer'),
        ('Optimizer.transform=3', 'Optimizer.transform is 3'),
        ('Optimizer.clip_norm=-1.0', 'Optimizer.clip_norm'),
        ('TransformerConfig.dropout_rate=-0.5', 'dropout_rate is -0.5'),
        ('SampleConfig.temperature=-1.0', 'temperature'),
        ('train.seed=-1', 'seed is -1'),
        ('train.seed=None', 'seed is None'),
        ('train.log_period=True', 'log_period is True'),
        ('create_learning_rate_scheduler.steps_per_cycle=0', 'steps_per_cycle 0'),
        ("MODEL_DIR='gs://bucket/run'", 'MODEL_DIR .gs://bucket/run. must be'),
        ("MODEL_DIR=''", 'MODEL_DIR'),
        ("PjitPartitioner.logical_axis_rules=[('a', 'b', 'c')]", 'is no rule'),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(
    run, tmp_path, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob('*'))
    sample = ['train.sample=@SampleConfig()'] if change.startswith('SampleConfig') else []
    # gin passes an error on in a class of its own, made of the first
    with pytest.raises(ValueError, match=message):
        run(tmp_path / 'model', *sample, change)
    assert sorted(tmp_path.rglob('*')) == before


def test_explicit_axes_are_refused_before_anything_is_made(run, tmp_path):
    with pytest.raises(ConfigError, match=r'Explicit.*: these models need Auto axes'):
        run(tmp_path / 'model', "PjitPartitioner.axis_types='explicit'")
    assert not (tmp_path / 'model').exists()
