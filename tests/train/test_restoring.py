"""Where a run begins: what of another run's checkpoint, or of its own, is refused or said."""

import dataclasses
import inspect
import json

import pytest
from small import RULES, model
from small_runs import records

from partitioning import PjitPartitioner
from train.checkpoints import RestoreConfig
from train.data import ByteTokenizer, CausalLM, TextFiles
from train.errors import ConfigError
from train.evaluation import evaluate_checkpoint


@dataclasses.dataclass(frozen=True)
class OtherBytes(ByteTokenizer):
    """Bytes by another name."""

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


def test_a_run_that_begins_with_another_ones_checkpoint_goes_beyond_it(run, tmp_path):
    run(tmp_path / 'one', 'TRAIN_STEPS=2')
    said = r'total_steps is 2, .*is of step 2 already: .*train to 4 for 2 steps more'
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / 'two', 'TRAIN_STEPS=2', *restoring(tmp_path / 'one'))
    assert not (tmp_path / 'two').exists()


def test_a_run_with_nothing_left_shows_its_scores_and_writes_none_again(run, tmp_path, capsys):
    run(tmp_path / 'one', 'TRAIN_STEPS=3')
    before = records(tmp_path / 'one')
    capsys.readouterr()
    run(tmp_path / 'one', 'TRAIN_STEPS=2')
    said = capsys.readouterr().out
    assert 'total_steps is 2, and the checkpoint of step 3' in said
    assert f'{before[-1]["eval/bits_per_byte"]:.3f}' in said
    assert records(tmp_path / 'one') == before
    listed = [line.split()[-1] for line in said.split('-- files')[1].split('\n') if '/' in line]
    assert listed and all((tmp_path / line).exists() for line in listed)


def test_a_checkpoint_of_another_tokenizer_is_refused(run, evaluate, tmp_path):
    run(tmp_path / 'one', 'TRAIN_STEPS=2')
    noted = tmp_path / 'one' / 'data.json'
    data = json.loads(noted.read_text())
    assert data['tokenizer'] == 'bytes'
    with pytest.raises(ConfigError, match=r"tokenizer 'bytes' .*has 'other bytes'.*RestoreConfig"):
        evaluate(tmp_path / 'one', OtherBytes())
    noted.write_text(json.dumps(data | {'tokenizer': 'sentencepiece 12'}))
    said = r"tokenizer 'sentencepiece 12' .*has 'bytes'"
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / 'two', *restoring(tmp_path / 'one/checkpoints'))
    assert not (tmp_path / 'two').exists()
    assert not (tmp_path / 'scores').exists()
    noted.write_text('{}')
    with pytest.raises(ConfigError, match=r'data\.json cannot be read'):
        run(tmp_path / 'two', *restoring(tmp_path / 'one'))
    noted.unlink()
    assert int(run(tmp_path / 'two', 'TRAIN_STEPS=3', *restoring(tmp_path / 'one')).step) == 3


def test_a_checkpoint_of_another_model_names_what_names_it(run, tmp_path):
    run(tmp_path / 'one', 'TRAIN_STEPS=2')
    change = 'TransformerConfig.mlp_dim=128'
    with pytest.raises(ConfigError, match=r'or another RestoreConfig\.path'):
        run(tmp_path / 'two', *restoring(tmp_path / 'one'), change)
    with pytest.raises(ConfigError, match=r'or another MODEL_DIR'):
        run(tmp_path / 'one', change)


def a_partitioner(**changes):
    return PjitPartitioner(num_partitions=1, logical_axis_rules=RULES, **changes)


@pytest.mark.parametrize(
    'change, said',
    [
        ({'output_dir': 'gs://x'}, "output_dir 'gs://x' must be"),
        ({'output_dir': __file__}, 'output_dir .* is a file'),
        ({'model': 3}, r'evaluate_checkpoint\.model is 3'),
        ({'tasks': {}}, r'evaluate_checkpoint\.tasks is empty'),
        ({'tasks': [3]}, r'evaluate_checkpoint\.tasks is a list'),
        ({'tasks': {'a': 3}}, r"evaluate_checkpoint\.tasks\['a'\] is 3"),
        ({'restore': RestoreConfig}, r'evaluate_checkpoint\.restore is the class'),
        ({'prefetch': 3}, r'evaluate_checkpoint\.prefetch is 3'),
        ({'partitioner': a_partitioner(params_on_devices=False)}, 'params_on_devices is False'),
        ({'partitioner': a_partitioner(backend='quark')}, 'has no mesh: Unknown backend'),
        ({'partitioner': a_partitioner(axis_types='explicit')}, 'need Auto axes'),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_what_an_evaluation_refuses_names_its_own_settings(evaluate, tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        evaluate(tmp_path / 'none', **change)
    assert not (tmp_path / 'scores').exists()


@pytest.mark.parametrize(
    'setting, said',
    [
        ('PjitPartitioner.params_on_devices=False', 'params_on_devices is False'),
        ("PjitPartitioner.backend='quark'", 'has no mesh: Unknown backend'),
        ("train.eval_tasks=['a']", r'train\.eval_tasks is a list'),
    ],
)
def test_what_a_run_refuses(run, tmp_path, setting, said):
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / 'model', setting)
    assert not (tmp_path / 'model').exists()
