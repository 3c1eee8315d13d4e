"""Runs from a seed, their metrics, and what follows a checkpoint of T5X, compared with T5X's runs.

T5X trained `MODEL` on the rows of PAIRS from random_seed=0, with dropout; see t5x_data/README.md.
"""

import dataclasses
import inspect
import json
import shutil

import numpy as np
import pytest
import t5x_reference
from small import partitioner, records

from partitioning import standard_logical_axis_rules
from train.checkpoints.formats.t5x_files import read_arrays
from train.data import ByT5Tokenizer, InputsToTargets
from train.reporting.writers import JsonWriter
from train.running.training import train as train_here
from train.t5x import checkpoint_configs, network
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.datasets import DatasetConfig
from train.t5x.models import EncoderDecoderModel
from train.t5x.schedules import create_learning_rate_scheduler
from train.t5x.train_script import train, translate
from train.t5x.trainer import Trainer

MODEL = {
    'vocab_size': 384,
    'dtype': 'float32',
    'emb_dim': 16,
    'num_heads': 2,
    'num_encoder_layers': 1,
    'num_decoder_layers': 1,
    'head_dim': 8,
    'mlp_dim': 32,
    'mlp_activations': ('gelu', 'linear'),
    'dropout_rate': 0.1,
    'logits_via_embedding': False,
}
WORDS = [''.join('abcdefgh'[i * k % 8] for k in range(i % 9 + 2)) for i in range(1, 25)]
PAIRS = [(word, word[::-1]) for word in WORDS]
LENGTHS = {'inputs': 12, 'targets': 12}


def dataset(**changes):
    return DatasetConfig(**{
        'mixture_or_task_name': InputsToTargets(source=PAIRS, held_out=PAIRS[:8], name='x'),
        'task_feature_lengths': LENGTHS,
        'split': 'train',
        'batch_size': 4,
        'shuffle': False,
    } | changes)  # fmt: skip


def settings(model_dir, **changes):
    model = EncoderDecoderModel(
        module=network.Transformer(config=network.T5Config(**MODEL)),
        input_vocabulary=ByT5Tokenizer(extra_ids=0),
        output_vocabulary=ByT5Tokenizer(extra_ids=0),
        optimizer_def=Adafactor(
            decay_rate=0.8, step_offset=0, logical_factor_rules=standard_logical_factor_rules()
        ),
        z_loss=1e-4,
        loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
    )
    rate = create_learning_rate_scheduler(
        factors='constant * rsqrt_decay', base_learning_rate=1.0, warmup_steps=1000
    )
    save = checkpoint_configs.SaveCheckpointConfig(period=10)
    parameters = inspect.signature(train).parameters
    given = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    given |= {
        'model': model,
        'train_dataset_cfg': dataset(),
        'checkpoint_cfg': checkpoint_configs.CheckpointConfig(save=save),
        'partitioner': partitioner(1, 1, logical_axis_rules=standard_logical_axis_rules()),
        'model_dir': str(model_dir),
        'total_steps': 10,
        'eval_period': 10,
        'stats_period': 5,
        'random_seed': 0,
    } | changes  # fmt: skip

    class OurTrainer(Trainer):
        def __init__(self):
            super().__init__(learning_rate_fn=rate)

    config = translate(given | {'trainer_cls': OurTrainer})
    return dataclasses.replace(config, writers=(JsonWriter,))


def compare_squares(path, expected):
    """Sums of squares of the parameters are T5X's after as many steps."""
    arrays = read_arrays(path)
    found = {name: arrays[f'target/{name}'].read() for name in expected}
    for name, array in found.items():
        squares = np.sum(np.square(array, dtype=np.float64))
        np.testing.assert_allclose(squares, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_a_run_from_a_seed_is_the_run_of_t5x(tmp_path):
    """Ten steps, with dropout, and what is reported of them; and four after T5X's checkpoint."""
    facts = json.loads((t5x_reference.DATA / 'seed_run.json').read_text())
    ours = tmp_path / 'ours'
    train_here(settings(ours))
    compare_squares(ours / 'checkpoint_10', facts['squares']['10'])
    written = [record for record in records(ours) if 'train/loss' in record]
    assert [record['step'] for record in written] == [5, 10]
    for name, by_step in facts['metrics'].items():
        for record in written:
            assert record[f'train/{name}'] == pytest.approx(
                by_step[str(record['step'])], rel=2e-5
            ), name

    # T5X has written this checkpoint, as far as anyone can see, so its data begins again.
    resumed = tmp_path / 'resumed'
    shutil.copytree(ours / 'checkpoint_10', resumed / 'checkpoint_10')
    (resumed / 'checkpoint_10' / 'manifest.json').unlink()
    shutil.rmtree(resumed / 'checkpoint_10' / 'run')
    train_here(settings(resumed, total_steps=12))
    train_here(settings(resumed, total_steps=14))  # It knows where its data began.
    compare_squares(resumed / 'checkpoint_14', facts['squares']['14'])
