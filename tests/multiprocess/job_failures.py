"""Failures before a run starts in only one of two processes, or data that differs between them."""

import dataclasses
import os
from pathlib import Path

import flax.linen as nn
import jax
import optax

from partitioning import PjitPartitioner
from train import NextToken, TrainConfig, evaluate, train
from train.checkpoints import RestoreConfig
from train.checkpoints.steps.manifest import Manifest, write_manifest
from train.data import CausalLM, Records
from train.data.record import check_same_everywhere, data_record
from train.errors import ConfigError
from train.processes.holding import hold_folder
from train.processes.together import check_same_step, raise_on_all_processes


def run(index, folder):
    """Reports the error that this process raises in each case, or None."""
    folder = Path(folder)
    if index == 0:
        (folder / 'checkpoints/3').mkdir(parents=True)
        write_manifest(folder / 'checkpoints/3', Manifest(step=3, files={}, versions={}))
    with raise_on_all_processes():
        pass  # Both processes now see the folder.
    return {
        'nobody fails': error_of(fail, index, None),
        'second fails': error_of(fail, index, ConfigError('no file matches')),
        'second fails with an OSError': error_of(fail, index, OSError('no such thing')),
        'same data': error_of(compare_data, ['a', 'b']),
        'different data': error_of(compare_data, ['a', 'b' if index else 'c']),
        'different steps': error_of(check_same_step, index),
        **failing_runs(index, folder),
    }


def failing_runs(index, folder):
    """Returns the errors of runs in which one process has a wrong folder or checkpoint.

    The settings are the same, but each process starts in a folder of its own.
    """
    own = folder / f'own {index}'
    (own / 'restored').parent.mkdir()
    (own / 'restored').symlink_to(folder if index == 0 else folder / 'none')
    (own / 'a run').symlink_to(folder / ('a run' if index else 'checkpoints/3/manifest.json'))
    os.chdir(own)
    config = TrainConfig(
        model_dir='a run',
        objective=NextToken(model=nn.Embed(257, 257)),
        partitioner=PjitPartitioner(layout='fsdp'),
        optimizer=optax.sgd(0.1),
        task=CausalLM(source=Records(records=['some text'] * 40, holdout_percent=20.0)),
        total_steps=4,
        batch_size=8,
        sequence_length=8,
    )
    restore = RestoreConfig(path='restored')
    shared = dataclasses.replace(config, model_dir=str(folder / 'shared'), restore=restore)
    changes = {
        'other learning rate in a closure': {'optimizer': optax.sgd(0.1 + index)},
        'other steps': {'total_steps': 4 + index},
        'folder': {'model_dir': 'own'},
    }
    return {
        'a file': error_of(train, config),
        'restore': error_of(train, shared),
        'in use': error_of(train_while_it_is_held, dataclasses.replace(shared, restore=None)),
        'evaluation': error_of(evaluate, shared, restore=restore, output_dir='scores'),
        **{
            name: error_of(train, dataclasses.replace(shared, restore=None, **change))
            for name, change in changes.items()
        },
    }


def train_while_it_is_held(config):
    """Trains in a folder that process 0 holds for another run."""
    with hold_folder('MODEL_DIR', config.model_dir, print) as held:
        assert (held is None) == (jax.process_index() != 0)
        train(config)


def error_of(function, *args, **kwargs):
    """The type and message of the error that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return '\n'.join(
            [f'{type(error).__name__}: {error}', getattr(error, 'details', '')]
        ).strip()


def fail(index, error):
    """Raises the error in the second process."""
    with raise_on_all_processes():
        if error is not None and index == 1:
            raise error


def compare_data(texts):
    """Compares the data of the processes."""
    task = CausalLM(source=Records(records=texts, holdout_percent=0)).open(8)
    check_same_everywhere(data_record(task, {'own': task}, seed=0))
