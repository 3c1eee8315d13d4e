"""The input of whole runs: packed rows, tokenizers, mixtures, several evaluations, the record."""

import json

import pytest
import sentencepiece
from small_runs import records

from train.errors import ConfigError


@pytest.fixture(scope='module')
def sentencepiece_model(tmp_path_factory):
    prefix = tmp_path_factory.mktemp('tokenizer') / 'numbers'
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f'file {i} counts: {i} {i + 1} {i * i}' for i in range(400)),
        model_prefix=str(prefix),
        vocab_size=120,
        minloglevel=2,
    )
    return prefix.with_suffix('.model')


def test_a_run_on_packed_rows_with_sentencepiece(run, tmp_path, capsys, sentencepiece_model):
    state = run(
        tmp_path / 'model',
        "CausalLM.packing='pack'",
        'CausalLM.tokenizer=@SentencePieceTokenizer()',
        f"SentencePieceTokenizer.path='{sentencepiece_model}'",
        'train.sample=@SampleConfig()',
        'SampleConfig.length=12',
        "SampleConfig.prompt='file 1'",
    )
    assert int(state.step) == 6
    scores = records(tmp_path / 'model')[-1]
    # A token stands for several bytes, so there are more nats per token than nats per byte.
    assert scores['eval/bits_per_byte'] < scores['eval/loss'] / 0.6931
    assert scores['eval/bits_per_byte'] < 9, 'close to the 8 bits of a uniform guess, or better'
    printed = capsys.readouterr().out
    assert 'tokenized TextFiles *.txt' in printed
    assert 'file 1' in printed, 'the sample begins with its prompt'


def test_a_mixture_with_several_evaluations(run, tmp_path, texts):
    (texts / 'more').mkdir()
    (texts / 'more/words.jsonl').write_text(
        ''.join(json.dumps({'body': f'word {i} ' * 9}) + '\n' for i in range(60))
    )
    run(
        tmp_path / 'model',
        'train.task=@Mixture()',
        'Mixture.tasks=[@CausalLM(), @words/CausalLM()]',
        'Mixture.weights=[3, 1]',
        'words/CausalLM.source=@JsonLines()',
        "JsonLines.pattern='more/*.jsonl'",
        f"JsonLines.root='{texts}'",
        "JsonLines.field='body'",
        'JsonLines.holdout_percent=30.0',
        "train.eval_tasks={'files': @CausalLM(), 'words': @words/CausalLM()}",
    )
    scores = records(tmp_path / 'model')[-1]
    assert scores['eval/files/loss'] != scores['eval/words/loss']
    record = json.loads((tmp_path / 'model/data.json').read_text())
    assert [part['weight'] for part in record['parts']] == [0.75, 0.25]


def test_reading_ahead_changes_no_results(run, tmp_path):
    run(tmp_path / 'threads')
    run(tmp_path / 'none', 'train.prefetch=@Prefetch()', 'Prefetch.workers=0')
    assert records(tmp_path / 'threads') == records(tmp_path / 'none')
    for name in ('threads', 'none'):
        lines = (tmp_path / name / 'metrics.jsonl').read_text().splitlines()
        shares = [r['train/input_wait'] for r in map(json.loads, lines) if 'train/loss' in r]
        assert len(shares) == 6
        assert all(0 <= share < 1 for share in shares)


def test_a_run_resumes_only_with_the_same_data(run, tmp_path, texts, capsys):
    model_dir = tmp_path / 'model'
    run(model_dir, 'TRAIN_STEPS=2')
    text = (texts / '3.txt').read_text()
    (texts / '3.txt').unlink()
    with pytest.raises(ConfigError, match=r'the data has changed .*documents.*another MODEL_DIR'):
        run(model_dir)
    (texts / '3.txt').write_text(text)
    run(model_dir, 'TRAIN_STEPS=3', 'BATCH_SIZE=16')
    assert 'batch_size changed from 8 to 16' in capsys.readouterr().out
    (texts / '3.txt').unlink()
    (model_dir / 'data.json').unlink()
    assert int(run(model_dir, 'BATCH_SIZE=16').step) == 6


@pytest.mark.parametrize(
    'changes, message',
    [
        (['TextFiles.holdout_percent=0.0'], 'nothing is held out'),
        (['TextFiles.holdout_percent=100.0'], 'no document to train on'),
        (['CausalLM.packing="tight"'], "packing is 'tight': use 'split' or 'pack'"),
        (['Prefetch.workers=-1', 'train.prefetch=@Prefetch()'], 'Prefetch.workers is -1'),
        (['CausalLM.source=@TextFiles'], r'CausalLM\.source is .*write @Name\(\)'),
        (['train.task=@CausalLM'], r'train\.task is .*write @'),
        (
            [
                'train.task=@SpanCorruption()',
                'SpanCorruption.source=@TextFiles()',
                'SpanCorruption.num_sentinels=20',
            ],
            r'encoder_input_tokens.*no model.*CausalLM',
        ),
        (
            [
                "train.eval_tasks={'packed': @other/CausalLM()}",
                'other/CausalLM.source=@TextFiles()',
                "other/CausalLM.packing='pack'",
            ],
            "rows of the evaluation 'packed' have .*decoder_segment_ids",
        ),
        (['train.eval_tasks=@CausalLM()'], 'eval_tasks is .*write '),
        (["train.eval_tasks={'a': @CausalLM}"], r"eval_tasks\['a'\] is the class CausalLM"),
        (['CausalLM.cache_dir=5'], 'cache_dir is 5'),
        (['TextFiles.root=5'], 'root is 5: write a path'),
        (['TextFiles.pattern=[]'], 'pattern is empty'),
        (
            [
                'CausalLM.tokenizer=@SentencePieceTokenizer()',
                "SentencePieceTokenizer.path='nowhere.model'",
            ],
            'tokenizer nowhere.model cannot be read',
        ),
        (["SampleConfig.prompt='a'", 'SampleConfig.length=1', 'train.sample=@SampleConfig()'],
         'the prompt already has 1 tokens'),
    ],
)  # fmt: skip
def test_invalid_settings_of_the_input(run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / 'model', *changes)
    assert not (tmp_path / 'model').exists()


def test_an_evaluation_needs_the_same_tokenizer(run, tmp_path, sentencepiece_model):
    with pytest.raises(ConfigError, match="the evaluation 'own' uses the tokenizer"):
        run(
            tmp_path / 'model',
            "train.eval_tasks={'own': @own/CausalLM()}",
            'own/CausalLM.source=@TextFiles()',
            'own/CausalLM.tokenizer=@SentencePieceTokenizer()',
            f"SentencePieceTokenizer.path='{sentencepiece_model}'",
        )
    assert not (tmp_path / 'model').exists()
