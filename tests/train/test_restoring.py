"""Errors and messages about the checkpoint that a run or an evaluation starts from."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from small import Bigram, partitioner, records, small_config, text_task

from train import NextToken, evaluate
from train.checkpoints import CheckpointConfig, RestoreConfig, find_checkpoint
from train.checkpoints.orbax.files import read_orbax
from train.data import ByteTokenizer
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class OtherBytes(ByteTokenizer):
    """The tokenizer of bytes with another identity."""

    identity = 'other bytes'


def restoring(path, mode='latest', **changes):
    return {'restore': RestoreConfig(path=str(path), mode=mode), **changes}


def test_a_run_starts_from_the_checkpoint_of_another(run, finished, tmp_path, capsys):
    path = finished.directory / 'checkpoints/4'
    state = run(tmp_path / 'two', **restoring(path, 'specific', total_steps=5))
    assert int(state.step) == 5
    assert f'restored from step 4 of {path.parent}' in capsys.readouterr().out
    # The same step of the first run had the same state and batch.
    [ours, _], theirs = records(tmp_path / 'two'), records(finished.directory)
    assert ours in theirs
    with pytest.raises(ConfigError, match=r'total_steps is 2, .* step 6.* 8 .* 2 more steps'):
        run(tmp_path / 'three', **restoring(finished.directory, total_steps=2))
    assert not (tmp_path / 'three').exists()


def test_a_run_without_steps_left_prints_its_scores_and_writes_none(
    run, finished, tmp_path, capsys
):
    model_dir = finished.copy(tmp_path / 'model')
    before = records(model_dir)
    run(model_dir, total_steps=4)
    output = capsys.readouterr().out
    assert 'already at step 6; raise total_steps' in output
    assert f'{before[-1]["eval/bits_per_byte"]:.3f}' in output
    assert records(model_dir) == before
    listed = [line.split()[-1] for line in output.split('-- files')[1].split('\n') if '/' in line]
    assert listed and all((tmp_path / line).exists() for line in listed)


def test_the_scores_of_a_checkpoint_are_those_of_its_run(finished, texts, tmp_path, capsys):
    """On another mesh, and with another optimizer, whose state is not restored."""
    other = {'partitioner': partitioner(2, 4), 'batch_size': 16}
    config = small_config(finished.directory, texts, **other)
    newest = evaluate(config, output_dir=str(tmp_path / 'scores'))
    path = RestoreConfig(path=str(finished.directory / 'checkpoints/4'), mode='specific')
    older = evaluate(config, restore=path)
    for step, scores in ((4, older), (6, newest)):
        [during] = [
            r for r in records(finished.directory) if r['step'] == step and 'eval/loss' in r
        ]
        assert during == pytest.approx({'step': step, **scores}, rel=1e-5)
    assert records(tmp_path / 'scores/6') == [{'step': 6, **newest}]
    assert 'JsonWriter' in capsys.readouterr().out
    assert [p.name for p in (tmp_path / 'scores').iterdir()] == ['6']
    with pytest.raises(ConfigError, match='none has no complete checkpoint to evaluate'):
        evaluate(small_config(tmp_path / 'none', texts))


def test_a_checkpoint_of_another_tokenizer_is_an_error(run, finished, texts, tmp_path):
    other = finished.copy(tmp_path / 'one')
    record = other / 'data.json'
    data = json.loads(record.read_text())
    assert data['tokenizer'] == 'bytes'
    config = small_config(tmp_path / 'two', texts, task=text_task(texts, tokenizer=OtherBytes()))
    with pytest.raises(ConfigError, match=r"'bytes' .*'other bytes'.*RestoreConfig"):
        evaluate(config, restore=RestoreConfig(path=str(other)))
    record.write_text(json.dumps(data | {'tokenizer': 'sentencepiece 12'}))
    with pytest.raises(ConfigError, match=r"'sentencepiece 12' .*'bytes'"):
        run(tmp_path / 'two', **restoring(other / 'checkpoints', total_steps=7))
    assert not (tmp_path / 'two').exists()
    record.write_text('{}')
    with pytest.raises(ConfigError, match=r'data\.json cannot be read'):
        run(tmp_path / 'two', **restoring(other, total_steps=7))
    record.unlink()
    assert int(run(tmp_path / 'two', **restoring(other, total_steps=7)).step) == 7


def test_a_checkpoint_of_another_model_names_the_array_and_the_setting(
    run, finished, texts, tmp_path
):
    changes = {'objective': NextToken(model=Bigram(width=32)), 'total_steps': 7}
    array = r'BatchNorm_0/mean: \(16,\) float32 in the checkpoint, \(32,\) float32'
    with pytest.raises(ConfigError, match=rf'{array}.* RestoreConfig\.path'):
        run(tmp_path / 'two', **restoring(finished.directory, **changes))
    with pytest.raises(ConfigError, match=rf'{array}.* MODEL_DIR'):
        run(finished.copy(tmp_path / 'one'), **changes)
    with pytest.raises(ConfigError, match=array):
        evaluate(small_config(finished.directory, texts, **changes))


@pytest.mark.parametrize(
    'path, mode, expected',
    [
        ('nowhere', 'latest', r'RestoreConfig\.path \S+nowhere does not exist'),
        ('model/checkpoint_20', 'specific', r'T5X.* is \S+/model/checkpoints/20$'),
        ('model', 'specific', r"checkpoints/<step>.*mode 'latest'"),
        (
            'model/checkpoints/7',
            'specific',
            r'not a complete checkpoint; complete steps in \S+/checkpoints: none',
        ),
        ('model', 'latest', 'not a complete checkpoint'),
    ],
)
def test_missing_checkpoints(tmp_path, path, mode, expected):
    (tmp_path / 'model/checkpoints/7').mkdir(parents=True)
    with pytest.raises(ConfigError, match=expected):
        find_checkpoint(RestoreConfig(path=str(tmp_path / path), mode=mode))


# Restoring with renames, other dtypes and missing arrays. `finished` wrote the checkpoint.


def one_more_step(path, **settings):
    return {'restore': RestoreConfig(path=str(path), **settings), 'total_steps': 7}


def saved(finished, name):
    return read_orbax(finished.directory / 'checkpoints/6/state')[name].read()


WITHOUT_OPTIMIZER = ('opt_state/.*', None)


def test_an_array_can_be_restored_from_another_one(run, finished, tmp_path):
    """The scale of the normalization comes from its bias: one update moves it by about 3e-3."""
    swap = ('params/BatchNorm_0/scale', 'params/BatchNorm_0/bias')
    settings = one_more_step(finished.directory, renames=[swap], strict=False)
    state = run(tmp_path / 'two', **settings, partitioner=partitioner(2, 4))
    scale, bias = (saved(finished, f'params/BatchNorm_0/{n}') for n in ('scale', 'bias'))
    moved = state.params['BatchNorm_0']['scale']
    np.testing.assert_allclose(moved, bias, atol=0.01)
    assert abs(moved - scale).min() > 0.5


def test_missing_arrays_are_initialized_only_if_asked(run, finished, tmp_path, capsys):
    settings = {'renames': [WITHOUT_OPTIMIZER], 'strict': False, 'initialize_missing': True}
    state = run(tmp_path / 'two', **one_more_step(finished.directory, **settings))
    assert int(state.step) == 7
    [count] = {int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0}
    assert count == 1, 'the optimizer is new, the step is not'
    output = capsys.readouterr().out
    assert 'initializing 9 arrays that are not restored' in output
    assert '9 extra, not restored; 9 missing, initialized' in output
    assert re.search(r'opt_state/\S+ +\S.* float32 +absent +extra, not restored', output)
    settings['initialize_missing'] = False
    hint = r'/count: left out by RestoreConfig.renames, .*initialize_missing = True'
    with pytest.raises(ConfigError, match=hint):
        run(tmp_path / 'three', **one_more_step(finished.directory, **settings))
    settings = {'renames': [WITHOUT_OPTIMIZER], 'initialize_missing': True}
    with pytest.raises(ConfigError, match=r'opt_state/\S+: .* in the checkpoint, absent in this'):
        run(tmp_path / 'three', **one_more_step(finished.directory, **settings))


def test_parameters_only_with_another_optimizer(run, finished, tmp_path, capsys):
    changes = one_more_step(finished.directory, parameters_only=True)
    state = run(tmp_path / 'two', **changes, optimizer=optax.sgd(0.0, momentum=0.9))
    assert int(state.step) == 7, 'the step counts on'
    for ours, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(finished.state.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert 'initializing 4 arrays' in capsys.readouterr().out, 'the momentum'
    changes = one_more_step(finished.directory, parameters_only=True, renames=[('step', None)])
    with pytest.raises(ConfigError, match=r'step: left out by .*initialize_missing = True'):
        run(tmp_path / 'three', **changes)


@pytest.mark.parametrize('path, mode', [('', 'latest'), ('checkpoints/6', 'specific')])
def test_a_checkpoint_without_a_manifest_is_restored_with_a_warning(
    run, finished, tmp_path, capsys, path, mode
):
    """As an older version left it. In mode 'latest', an empty folder is passed over by name."""
    other = finished.copy(tmp_path / 'other')
    (other / 'checkpoints/6/manifest.json').unlink()
    shutil.rmtree(other / 'checkpoints/6/run')
    (other / 'checkpoints/9').mkdir()
    state = run(tmp_path / 'two', **one_more_step(other / path, mode=mode))
    assert int(state.step) == 7
    output = capsys.readouterr().out
    assert 'restored from step 6' in output and 'nothing can be verified' in output
    passed_over = 'checkpoints/9 is not a checkpoint: looking for an older' in output
    assert passed_over == (mode == 'latest')


@pytest.mark.parametrize(
    'renames, expected',
    [
        (
            [('params/Dense/kernel', 'x')],
            r"pattern 'params/Dense/kernel' matches no array of this run: remove it",
        ),
        ([('params/Dense_0/(.*)', r'params/Dens/\1')], r'no array params/Dens/kernel, .*Did you'),
        ([('params/(.*', 'x')], r'renames\[0\] is .*regular expression'),
        ([('params/.*', r'\1')], r'renames\[0\] is .*invalid group reference'),
        (['params'], r'renames\[0\] is .*write a pair'),
    ],
)
def test_wrong_renames(run, finished, tmp_path, renames, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        run(tmp_path / 'two', **one_more_step(finished.directory, renames=renames))
    assert '\n' not in str(error.value)


def test_an_evaluation_in_bfloat16(finished, texts, run, tmp_path):
    """Its loss differs from that in float32 by the rounding of the parameters, and not by more."""
    config = small_config(finished.directory, texts)
    exact = evaluate(config)['eval/loss']
    rounded = RestoreConfig(path=str(finished.directory), dtype='bfloat16')
    loss = evaluate(config, restore=rounded)['eval/loss']
    assert loss != exact
    assert loss == pytest.approx(exact, rel=0.01)
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16', but this run trains .* float32"):
        run(tmp_path / 'two', restore=rounded, total_steps=7)


def test_a_run_that_saves_nothing(run, tmp_path):
    config = CheckpointConfig(period=0, at_end=False)
    run(tmp_path / 'one', checkpoints=config, total_steps=2)
    assert not list((tmp_path / 'one').glob('checkpoints/*'))


def test_a_model_dir_of_t5x_is_refused_and_left_alone(run, tmp_path):
    checkpoint = tmp_path / 'model/checkpoint_40'
    checkpoint.mkdir(parents=True)
    (checkpoint / 'checkpoint').write_bytes(b'')
    with pytest.raises(ConfigError, match=r'T5X, up to checkpoint_40.*another MODEL_DIR'):
        run(tmp_path / 'model')
    assert [p.name for p in (tmp_path / 'model').iterdir()] == ['checkpoint_40']
