"""Errors and messages about the checkpoint that a run or an evaluation starts from."""

import dataclasses
import inspect
import json

import pytest
from small import RULES, model
from small_runs import records

from partitioning import PjitPartitioner
from partitioning.mesh import MeshConfig
from train.checkpoints import RestoreConfig
from train.data import ByteTokenizer, CausalLM, TextFiles
from train.errors import ConfigError
from train.evaluation import evaluate_checkpoint


@dataclasses.dataclass(frozen=True)
class OtherBytes(ByteTokenizer):
    """The tokenizer of bytes with another identity."""

    identity = 'other bytes'


@pytest.fixture
def evaluate(texts, tmp_path):
    """Evaluates the small model; changes are arguments of `evaluate_checkpoint`."""

    def evaluate(path, tokenizer=None, **changes):
        source = TextFiles(pattern='*.txt', root=str(texts), holdout_percent=20.0)
        task = CausalLM(source=source, tokenizer=tokenizer or ByteTokenizer())
        settings = {
            'output_dir': str(tmp_path / 'scores'),
            'model': model(),
            'partitioner': PjitPartitioner(num_partitions=1, logical_axis_rules=RULES),
            'tasks': {'': task},
            'restore': RestoreConfig(path=str(path)),
            'batch_size': 8,
            'sequence_length': 16,
        }
        return inspect.unwrap(evaluate_checkpoint)(**(settings | changes))

    return evaluate


def restoring(path):
    return ['train.restore=@RestoreConfig()', f"RestoreConfig.path='{path}'"]


def test_a_run_that_restores_a_checkpoint_needs_steps_after_it(run, finished, tmp_path):
    expected = r'total_steps is 2, .* step 6.* 8 .* 2 more steps'
    with pytest.raises(ConfigError, match=expected):
        run(tmp_path / 'two', 'TRAIN_STEPS=2', *restoring(finished.directory))
    assert not (tmp_path / 'two').exists()


def test_a_run_without_steps_left_prints_its_scores_and_writes_none(
    run, finished, tmp_path, capsys
):
    model_dir = finished.copy(tmp_path / 'model')
    before = records(model_dir)
    run(model_dir, 'TRAIN_STEPS=4')
    output = capsys.readouterr().out
    assert 'already at step 6 of 4; raise TRAIN_STEPS' in output
    assert f'{before[-1]["eval/bits_per_byte"]:.3f}' in output
    assert records(model_dir) == before
    listed = [line.split()[-1] for line in output.split('-- files')[1].split('\n') if '/' in line]
    assert listed and all((tmp_path / line).exists() for line in listed)


def test_a_checkpoint_of_another_tokenizer_is_an_error(run, evaluate, finished, tmp_path):
    other = finished.copy(tmp_path / 'one')
    record = other / 'data.json'
    data = json.loads(record.read_text())
    assert data['tokenizer'] == 'bytes'
    with pytest.raises(ConfigError, match=r"'bytes' .*'other bytes'.*RestoreConfig"):
        evaluate(other, OtherBytes())
    record.write_text(json.dumps(data | {'tokenizer': 'sentencepiece 12'}))
    with pytest.raises(ConfigError, match=r"'sentencepiece 12' .*'bytes'"):
        run(tmp_path / 'two', *restoring(other / 'checkpoints'), 'TRAIN_STEPS=7')
    assert not (tmp_path / 'two').exists()
    assert not (tmp_path / 'scores').exists()
    record.write_text('{}')
    with pytest.raises(ConfigError, match=r'data\.json cannot be read'):
        run(tmp_path / 'two', *restoring(other), 'TRAIN_STEPS=7')
    record.unlink()
    assert int(run(tmp_path / 'two', *restoring(other), 'TRAIN_STEPS=7').step) == 7


def test_a_checkpoint_of_another_model_names_the_array_and_the_setting(run, finished, tmp_path):
    changes = ['TransformerConfig.mlp_dim=128', 'TRAIN_STEPS=7']
    array = r'mlp/down: \(1, 64, 32\) float32 in the checkpoint, \(1, 128, 32\) float32'
    with pytest.raises(ConfigError, match=rf'{array}.* RestoreConfig\.path'):
        run(tmp_path / 'two', *restoring(finished.directory), *changes)
    with pytest.raises(ConfigError, match=rf'{array}.* MODEL_DIR'):
        run(finished.copy(tmp_path / 'one'), *changes)


def partitioner(**changes):
    return PjitPartitioner(**({'num_partitions': 1, 'logical_axis_rules': RULES} | changes))


EXPLICIT = MeshConfig(axes={'data': 8, 'model': 1}, axis_types='explicit')


@pytest.mark.parametrize(
    'change, expected',
    [
        ({'output_dir': 'gs://x'}, "output_dir 'gs://x' must be"),
        ({'output_dir': __file__}, 'output_dir .* is a file'),
        ({'model': 3}, r'evaluate_checkpoint\.model is 3'),
        ({'tasks': {}}, r'evaluate_checkpoint\.tasks is empty'),
        ({'tasks': [3]}, r'evaluate_checkpoint\.tasks is a list'),
        ({'tasks': {'a': 3}}, r"evaluate_checkpoint\.tasks\['a'\] is 3"),
        ({'restore': RestoreConfig}, r'evaluate_checkpoint\.restore is the class'),
        ({'prefetch': 3}, r'evaluate_checkpoint\.prefetch is 3'),
        ({'partitioner': partitioner(params_on_devices=False)}, 'params_on_devices is False'),
        ({'partitioner': partitioner(backend='quark')}, 'no mesh: Unknown backend'),
        (
            {'partitioner': partitioner(num_partitions=None, mesh=EXPLICIT)},
            'Explicit.* need Auto axes',
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_a_bad_setting_of_an_evaluation_is_an_error(evaluate, tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        evaluate(tmp_path / 'none', **change)
    assert not (tmp_path / 'scores').exists()
