"""Failures before a run starts in only one of two processes, or data that differs between them."""

import inspect
from pathlib import Path

import optax

from partitioning import PjitPartitioner
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import CausalLM, Records
from train.data.record import check_same_everywhere, data_record
from train.errors import ConfigError
from train.evaluation import evaluate_checkpoint
from train.machine import check_same_step, raise_on_all_processes
from train.models.transformer import Transformer, TransformerConfig
from train.optimizers import Optimizer
from train.train import train


def run(index, folder):
    """Reports the error that this process raises in each case, or None."""
    folder = Path(folder)
    if index == 0:
        (folder / 'checkpoints/3').mkdir(parents=True)
        (folder / 'checkpoints/3/_CHECKPOINT_METADATA').touch()
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
    """Returns the errors of runs in which one process has a wrong folder or checkpoint."""
    config = TransformerConfig(
        vocab_size=264,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=16,
    )
    task = CausalLM(source=Records(records=['some text'] * 40, holdout_percent=20.0))
    settings = {
        'model': Transformer(config),
        'partitioner': PjitPartitioner(num_partitions=1),
        'batch_size': 8,
        'sequence_length': 8,
    }
    training = settings | {
        'total_steps': 4,
        'eval_period': 0,
        'task': task,
        'optimizer': Optimizer(transform=optax.sgd, learning_rate=0.1),
        'checkpoints': CheckpointConfig(),
    }
    own = str(folder / f'own {index}')
    a_file = str(folder / 'checkpoints/3/_CHECKPOINT_METADATA')
    restore = RestoreConfig(path=str(folder if index == 0 else folder / 'none'))
    run_training, evaluate = inspect.unwrap(train), inspect.unwrap(evaluate_checkpoint)
    return {
        'folder': error_of(run_training, model_dir=own if index else a_file, **training),
        'restore': error_of(run_training, model_dir=own, restore=restore, **training),
        'evaluation': error_of(
            evaluate, output_dir=own, tasks={'': task}, restore=restore, **settings
        ),
    }


def error_of(function, *args, **kwargs):
    """The type and message of the error that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f'{type(error).__name__}: {error}'


def fail(index, error):
    """Raises the error in the second process."""
    with raise_on_all_processes():
        if error is not None and index == 1:
            raise error


def compare_data(texts):
    """Compares the data of the processes."""
    task = CausalLM(source=Records(records=texts, holdout_percent=0)).open(8)
    check_same_everywhere(data_record(task, {'own': task}, seed=0))
