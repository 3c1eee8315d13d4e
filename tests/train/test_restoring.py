"""Errors and messages about the checkpoint that a run or an evaluation starts from."""

import dataclasses
import json

import pytest
from small import Bigram, partitioner, records, small_config, text_task

from train import NextToken, evaluate
from train.checkpoints import RestoreConfig, find_checkpoint
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
