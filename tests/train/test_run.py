"""A whole run in this process: compiled once, resumed exactly, stopped if the loss is not finite.

Most tests begin with a copy of one finished run of 6 steps.
"""

import collections

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from optax.losses import squared_error
from small import Traced, partitioner, records

from partitioning import Plan
from partitioning.state import path_str
from train import Optimizer, Supervised
from train.checkpoints import Checkpoints, DamagedCheckpoint, complete_steps
from train.data import Examples


def assert_equal_states(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.sharding == b.sharding
        assert (jax.device_get(a) == jax.device_get(b)).all()


def after(step, action):
    """A hook that calls a function after a step."""
    return lambda state, current, metrics: action() if current == step else None


@pytest.mark.smoke
def test_a_run_with_evaluations_and_checkpoints_traces_the_model_and_the_step_once(finished):
    assert int(finished.state.step) == 6
    traces = collections.Counter(finished.traces)
    assert (traces['init'], traces['train']) == (1, 1)
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(finished.state.params))
    assert complete_steps(finished.directory / 'checkpoints') == [2, 4, 6]
    written = records(finished.directory)
    assert [r['step'] for r in written] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert all(
        {'train/loss', 'train/gradient_norm', 'train/learning_rate'} <= r.keys()
        or {'eval/loss', 'eval/accuracy', 'eval/bits_per_byte'} <= r.keys()
        for r in written
    )


def test_an_error_during_a_step_does_not_stop_a_save_that_has_begun(run, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'model', hooks=[after(3, interrupt)])
    assert complete_steps(tmp_path / 'model/checkpoints') == [2]


def test_a_run_resumes_on_another_mesh(run, finished, tmp_path):
    model_dir = finished.copy(tmp_path / 'model', last_step=4)
    state = run(model_dir, partitioner=partitioner(2, 4))
    assert dict(jax.tree.leaves(state.params)[0].sharding.mesh.shape) == {'data': 2, 'model': 4}
    one, two = records(finished.directory), records(model_dir)
    assert len(one) == len(two)
    assert one[-1]['eval/loss'] == pytest.approx(two[-1]['eval/loss'], rel=1e-5)


def test_the_plan_of_a_run_lays_out_another(run, finished, tmp_path):
    """The plan overrides rules that would replicate every array."""
    plan = Plan.load(finished.directory / 'plan.json')
    planned = {row.path: row.spec for row in plan.rows}
    held = jax.tree_util.tree_leaves_with_path(finished.state)
    assert planned.keys() == {path_str(path) for path, _ in held}
    for path, x in held:
        spec = jax.sharding.NamedSharding(x.sharding.mesh, planned[path_str(path)])
        assert x.sharding.is_equivalent_to(spec, x.ndim)
    rules = [('batch', 'data'), ('vocab', None), ('embed', None)]
    other = partitioner(4, 2, logical_axis_rules=rules, layout=plan)
    state = run(tmp_path / 'model', total_steps=2, partitioner=other)
    for a, b in zip(jax.tree.leaves(finished.state), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    [one] = [r for r in records(finished.directory) if r['step'] == 2 and 'eval/loss' in r]
    assert one['eval/loss'] == pytest.approx(records(tmp_path / 'model')[-1]['eval/loss'], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(run, finished, tmp_path):
    model_dir = finished.copy(tmp_path / 'model', last_step=2)
    optimizer = Optimizer(transform=optax.adamw, learning_rate=1e38)
    with pytest.raises(FloatingPointError, match=r'at step \d+; .*checkpoint of step 2:'):
        run(model_dir, optimizer=optimizer)
    assert complete_steps(model_dir / 'checkpoints') == [2]


def test_a_step_that_is_not_finite_names_the_data_that_is_not(run, tmp_path):
    rows = {'x': np.ones((8, 4), np.float32), 'y': np.ones((8, 4), np.float32)}
    rows['y'][3] = np.nan
    squares = Supervised(model=nn.Dense(4), inputs='x', targets='y', row_loss=squared_error)
    fsdp = partitioner(4, 2, logical_axis_rules=None, layout='fsdp')
    settings = {'objective': squares, 'task': Examples(training=rows), 'evaluators': {}}
    words = r'at step 1, whose batch has NaN or infinite values in y; .*: mend the data, or'
    with pytest.raises(FloatingPointError, match=words):
        run(tmp_path / 'model', partitioner=fsdp, sequence_length=None, **settings)


def test_incomplete_checkpoints_are_skipped_and_saved_again(run, finished, tmp_path, capsys):
    model_dir = finished.copy(tmp_path / 'model')
    checkpoints = model_dir / 'checkpoints'
    (checkpoints / '6/_CHECKPOINT_METADATA').unlink()
    (checkpoints / '9').mkdir()
    assert_equal_states(run(model_dir), finished.state)
    assert 'resumed from step 4' in capsys.readouterr().out
    assert complete_steps(checkpoints)[-2:] == [4, 6]
    assert records(model_dir) == records(finished.directory)


def test_damage_that_is_found_while_reading_is_skipped(
    run, finished, tmp_path, capsys, monkeypatch
):
    model_dir, restore = finished.copy(tmp_path / 'model'), Checkpoints.restore

    def find_damage(self, step, *args):
        if step == 6:
            raise DamagedCheckpoint('a file of step 6 is damaged')
        return restore(self, step, *args)

    monkeypatch.setattr(Checkpoints, 'restore', find_damage)
    objective = Traced()
    state = run(model_dir, total_steps=2, relative_steps=True, objective=objective)
    assert_equal_states(state, finished.state)
    output = capsys.readouterr().out
    assert 'a file of step 6 is damaged: it is kept' in output and 'resumed from step 4' in output
    assert records(model_dir) == records(finished.directory)
    assert objective.traces.count('train') == 1


def test_metrics_after_the_newest_checkpoint_are_dropped(run, finished, tmp_path, capsys):
    model_dir = finished.copy(tmp_path / 'model', last_step=0)
    run(model_dir, total_steps=1)
    dropped = len(records(finished.directory))
    assert f'dropped {dropped} metrics records after step 0' in capsys.readouterr().out
    assert [r['step'] for r in records(model_dir)] == [1, 1]
