"""A run that resumes says which of its settings changed, and which of them matter to the result."""

import dataclasses

import optax
import pytest
from small import small_config

from train import train
from train.checkpoints import CheckpointConfig
from train.running.changes import describe_changes, effect_of, parse_settings, settings_of

GIN = """
# Macros:
LEARNING_RATE = 0.05
PERIOD = 225
TRAIN_STEPS = 450
WIDTH = 64

# Parameters for CheckpointConfig:
CheckpointConfig.period = %PERIOD
# Parameters for adam/optax.warmup_cosine_decay_schedule:
adam/optax.warmup_cosine_decay_schedule.peak_value = %LEARNING_RATE
optax.warmup_cosine_decay_schedule.decay_steps = %TRAIN_STEPS
TrainConfig.total_steps = %TRAIN_STEPS
TrainConfig.batch_size = 16
TrainConfig.log_every = 10
TrainConfig.num_microbatches = 2
PjitPartitioner.num_partitions = 2
TransformerConfig.mlp_dim = %WIDTH
TextFiles.exclude = \\
    ('/a/',
     '/b/')
"""


@pytest.mark.parametrize(
    ('line', 'changed', 'words'),
    [
        ('LEARNING_RATE = 0.05', 'LEARNING_RATE = 0.06', '0.05 -> 0.06 (changes the result of'),
        ('PERIOD = 225', 'PERIOD = 100', '225 -> 100 (does not change the result)'),
        ('TrainConfig.log_every = 10', 'TrainConfig.log_every = 1', '(does not change the result)'),
        (
            'num_partitions = 2',
            'num_partitions = 4',
            '(changes the result by rounding only)',
        ),
        (
            'microbatches = 2',
            'microbatches = 4',
            '2 -> 4 (changes dropout masks, and the result by',
        ),
        ('WIDTH = 64', 'WIDTH = 96', '64 -> 96 (changes the result of later steps)'),
        # The schedule of the learning rate ends at this step.
        (
            'TRAIN_STEPS = 450',
            'TRAIN_STEPS = 500',
            '-> 500 (changes the result of later steps)',
        ),
        ("     '/b/')", "     '/c/')", "('/a/', '/b/') -> ('/a/', '/c/') (changes the result"),
        ('TrainConfig.log_every = 10\n', '', 'TrainConfig.log_every: 10 -> not set (does not'),
    ],
)
def test_what_changed_in_gin_files(line, changed, words):
    assert line in GIN
    found = describe_changes(parse_settings(GIN), parse_settings(GIN.replace(line, changed)))
    assert found[0] == 'settings that changed since the run was last started:'
    assert len(found) == 2 and words in found[1]


def test_what_matters_comes_first_and_the_data_is_told_elsewhere():
    before = parse_settings(GIN)
    now = before | {'PERIOD': '1', 'LEARNING_RATE': '1', 'TrainConfig.batch_size': '32'}
    names = [line.split(':')[0].strip() for line in describe_changes(before, now)[1:]]
    assert names == ['LEARNING_RATE', 'PERIOD']
    assert describe_changes(before, before) == describe_changes({}, before) == []


@pytest.mark.parametrize(
    ('name', 'effect'),
    [
        ("TrainConfig.evaluators['eval'].every", 'none'),
        ('TrainConfig.optimizer.update(step_size)', 'result'),
        ('TrainConfig.stop_when[0].patience', 'end'),
        ('t5x.train.total_steps', 'end'),
        ('HeldOut.limit', 'none'),
        ('Optimizer.clip_norm', 'result'),
    ],
)
def test_the_effect_of_a_setting(name, effect):
    assert effect_of(name, {}) == effect


def test_a_run_from_python_says_that_its_learning_rate_changed(texts, tmp_path, capsys):
    config = small_config(
        tmp_path / 'run',
        texts,
        optimizer=optax.sgd(0.25),
        total_steps=2,
        checkpoints=CheckpointConfig(period=2),
    )
    train(config)
    capsys.readouterr()
    train(dataclasses.replace(config, total_steps=4))
    said = capsys.readouterr().out
    lines = [x for x in said.splitlines() if ' -> ' in x]
    assert said.index(' -> ') < said.index('tracing the train step')
    assert lines == ['  TrainConfig.total_steps: 2 -> 4 (changes when the run ends)']
    changes = {'total_steps': 6, 'optimizer': optax.sgd(0.5), 'log_every': 3}
    train(dataclasses.replace(config, **changes))
    lines = [x for x in capsys.readouterr().out.splitlines() if ' -> ' in x]
    # optax's function multiplies the gradients by the negative learning rate.
    assert (
        lines[0].startswith('  TrainConfig.optimizer')
        and '-0.25 -> -0.5 (changes the res' in lines[0]
    )
    assert lines[1:] == [
        '  TrainConfig.total_steps: 4 -> 6 (changes when the run ends)',
        '  TrainConfig.log_every: 1 -> 3 (does not change the result)',
    ]


def test_settings_that_hold_themselves_end(texts, tmp_path):
    def loss(x):
        return loss

    config = small_config(tmp_path / 'run', texts, hooks=[loss])
    assert 0 < len(settings_of(config, closures=True)) < 5000
