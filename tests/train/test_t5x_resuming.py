"""A run that T5X began and this trainer continues, in the same folder."""

import shutil

import numpy as np
import pytest
import t5x_reference
from small import partitioner, records

from partitioning import standard_logical_axis_rules
from train import TrainConfig, train
from train.checkpoints.formats.t5x_files import read_arrays
from train.data import Examples
from train.errors import ConfigError
from train.objectives import EncoderDecoder
from train.reporting.writers import JsonWriter
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.checkpoints import T5XCheckpointConfig


def settings(model_dir, **changes):
    """The ten steps that T5X trained on the four rows of one batch, on another mesh."""
    run = t5x_reference.facts('t5_1_1')['train']['default']
    adafactor = run['adafactor'] | {'logical_factor_rules': standard_logical_factor_rules()}
    return TrainConfig(**{
        'model_dir': model_dir,
        'objective': EncoderDecoder(
            model=t5x_reference.net('t5_1_1'), z_loss=run['z_loss'], loss_divisor='weights'
        ),
        'partitioner': partitioner(1, 2, logical_axis_rules=standard_logical_axis_rules()),
        'optimizer': Adafactor(**adafactor).optimizer(lambda step: run['learning_rate']),
        'task': Examples(training=t5x_reference.batch('t5_1_1')),
        'total_steps': 10,
        'batch_size': 4,
        'evaluators': {},
        'checkpoints': T5XCheckpointConfig(period=0, keep=None),
        'writers': (JsonWriter,),
        'log_every': 1,
    } | changes)  # fmt: skip


@pytest.fixture
def run_of_t5x(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    shutil.copytree(t5x_reference.checkpoint('t5_1_1-orbax-0'), folder / 'checkpoint_0')
    for name in ('config.gin', 'model-info.txt'):
        (folder / name).write_text('T5X\n')
    return folder


@pytest.mark.long
def test_ten_steps_from_a_checkpoint_of_t5x_are_those_of_t5x(run_of_t5x, capsys):
    before = {p: p.read_bytes() for p in run_of_t5x.rglob('*') if p.is_file()}
    train(settings(run_of_t5x))
    assert f'resumed from step 0 of {run_of_t5x}' in capsys.readouterr().out
    run = t5x_reference.facts('t5_1_1')['train']['default']
    losses = [r['train/loss'] + r['train/z_loss'] for r in records(run_of_t5x)]
    np.testing.assert_allclose(losses, run['loss_before_step'], rtol=3e-5)
    arrays = read_arrays(run_of_t5x / 'checkpoint_10')
    expected = {f'target/{name}': x for name, x in run['params_after'].items()}
    expected |= {f'state/param_states/{name}': x for name, x in run['state_after'].items()}
    assert expected.keys() <= arrays.keys() and arrays['state/step'].read() == 10
    for name, (shape, dtype, _, squares) in expected.items():
        found = arrays[name].read()
        assert (list(found.shape), str(found.dtype)) == (shape, dtype)
        found = np.sum(np.square(found, dtype=np.float64))
        np.testing.assert_allclose(found, squares, rtol=2e-5, atol=1e-12, err_msg=name)
    assert before == {p: p.read_bytes() for p in before}, 'what T5X wrote is still there'
    assert 'encoder' in (run_of_t5x / 'model-info.meshwright.txt').read_text()


def test_a_run_whose_names_do_not_fit_is_refused(run_of_t5x):
    network = t5x_reference.net('t5_1_1', mlp_activations=('relu',))
    before = sorted(run_of_t5x.rglob('*'))
    with pytest.raises(ConfigError, match=r'checkpoint_0 belongs to .*mlp/wi/kernel') as error:
        train(settings(run_of_t5x, objective=EncoderDecoder(model=network)))
    assert '\n' not in str(error.value)
    assert before == sorted(run_of_t5x.rglob('*'))
