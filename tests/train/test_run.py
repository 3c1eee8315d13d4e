"""A whole run, in this process: compiled once, resumed exactly, stopped when the loss is lost."""

import json

import gin
import jax
import pytest

from train import train as train_module
from train.config import load_config

SMALL = [
    'TRAIN_STEPS=6',
    'EVAL_PERIOD=2',
    'CHECKPOINT_PERIOD=2',
    'SEQUENCE_LENGTH=16',
    'BATCH_SIZE=8',
    'TransformerConfig.num_layers=1',
    'TransformerConfig.embed_dim=32',
    'TransformerConfig.head_dim=8',
    'TransformerConfig.mlp_dim=64',
    'train.corpus=@TextFiles()',
    'train.log_period=1',
    'train.sample=None',
    'create_learning_rate_scheduler.steps_per_cycle=6',
]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / 'texts'
    folder.mkdir()
    for i in range(20):
        (folder / f'{i}.txt').write_text(f'file {i} counts: ' + ' '.join(map(str, range(i, 90))))
    return folder


@pytest.fixture
def run(texts):
    def run(model_dir, *changes):
        gin.clear_config()
        paths = [f"MODEL_DIR='{model_dir}'", f"TextFiles.root='{texts}'"]
        text = ["TextFiles.pattern='*.txt'", 'TextFiles.holdout_percent=20.0']
        load_config(['configs/runs/quickstart.gin'], [*SMALL, *paths, *text, *changes])
        return train_module.train()

    return run


def records(model_dir):
    lines = (model_dir / 'metrics.jsonl').read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if 'second' not in k} for line in lines]


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
