"""What only one of two processes fails at, before a run or an evaluation has cost anything."""

from processes import what_they_say

PROGRAM = """
import os, sys, time
import jax
from processes import say

port, count, index = map(int, sys.argv[1:4])
folder = sys.argv[4]
jax.config.update('jax_platforms', 'cpu')
jax.distributed.initialize(f'127.0.0.1:{port}', count, index)

import inspect
import optax
from partitioning import PjitPartitioner
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import CausalLM, Records
from train.errors import ConfigError
from train.evaluation import evaluate_checkpoint
from train.machine import check_same_step, raise_on_all_processes
from train.models.transformer import Transformer, TransformerConfig
from train.optimizers import Optimizer
from train.train import train

model = Transformer(TransformerConfig(vocab_size=264, num_layers=1, embed_dim=16, num_heads=2,
                                      num_kv_heads=2, head_dim=8, mlp_dim=16))
task = CausalLM(source=Records(records=['some text'] * 40, holdout_percent=20.0))
both = {'model': model, 'partitioner': PjitPartitioner(num_partitions=1), 'batch_size': 8,
        'sequence_length': 8}
whole = os.path.join(folder, 'checkpoints', '3')
if index == 0:
    os.makedirs(whole)
    open(os.path.join(whole, '_CHECKPOINT_METADATA'), 'w').close()
mine = os.path.join(folder, f'own {index}')
restore = RestoreConfig(path=folder if index == 0 else os.path.join(folder, 'none'))

def said(function, *args, **settings):
    try:
        function(*args, **settings)
    except ConfigError as error:
        return str(error)

def runs(**changes):
    settings = both | {'model_dir': mine, 'total_steps': 4, 'eval_period': 0, 'task': task,
                       'optimizer': Optimizer(transform=optax.sgd, learning_rate=0.1),
                       'checkpoints': CheckpointConfig()} | changes
    return said(inspect.unwrap(train), **settings)

def fails_at(kind):
    with raise_on_all_processes():
        if index == 1:
            raise kind('no such thing')

def kind_of(kind):
    try:
        fails_at(kind)
    except Exception as error:
        return f'{type(error).__name__}: {error}'

with raise_on_all_processes():
    pass  # the folder is there for both
say({
    'folder': runs(model_dir=whole + '/_CHECKPOINT_METADATA' if index == 0 else mine),
    'restore': runs(restore=restore),
    'evaluation': said(inspect.unwrap(evaluate_checkpoint), output_dir=mine, tasks={'': task},
                       restore=restore, **both),
    'other kinds': kind_of(OSError),
    'steps': said(check_same_step, index),
})
"""


def test_one_process_that_fails_takes_the_other_with_it(tmp_path):
    first, second = what_they_say(PROGRAM, 2, tmp_path)
    assert 'is a file, not a folder' in first['folder']
    assert second['folder'] == f'process 0 failed: {first["folder"]}'
    for name in ('restore', 'evaluation'):
        assert 'none does not exist' in second[name]
        assert first[name] == f'process 1 failed: {second[name]}'
    assert second['other kinds'] == 'OSError: no such thing'
    assert first['other kinds'] == 'ConfigError: process 1 failed: no such thing'
    assert first['steps'] == second['steps']
    assert 'different steps: [0, 1]' in first['steps']
