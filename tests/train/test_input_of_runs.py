"""The input of whole runs: packed rows, tokenizers, mixtures, several evaluations, a record."""

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


def test_packed_rows(run, tmp_path, capsys):
    state = run(tmp_path / 'model', "CausalLM.packing='pack'", 'SEQUENCE_LENGTH=64')
    assert int(state.step) == 6
    written = records(tmp_path / 'model')
    assert written[-1]['eval/bits_per_byte'] < 9, 'better than the 8 bits of a guess, nearly'
    assert 'tokenized TextFiles *.txt' in capsys.readouterr().out


def test_another_tokenizer(run, tmp_path, capsys, sentencepiece_model):
    run(
        tmp_path / 'model',
        'CausalLM.tokenizer=@SentencePieceTokenizer()',
        f"SentencePieceTokenizer.path='{sentencepiece_model}'",
        'train.sample=@SampleConfig()',
        'SampleConfig.length=12',
        "SampleConfig.prompt='file 1'",
    )
    scores = records(tmp_path / 'model')[-1]
    # A token is of several bytes, so nats a token are more than nats a byte.
    assert scores['eval/bits_per_byte'] < scores['eval/loss'] / 0.6931
    assert 'what the model makes of it' in capsys.readouterr().out


def test_a_mixture_with_evaluations_of_its_own(run, tmp_path, texts):
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


def test_input_wait_is_a_share(run, tmp_path):
    run(tmp_path / 'model', 'TRAIN_STEPS=3')
    lines = (tmp_path / 'model/metrics.jsonl').read_text().splitlines()
    shares = [r['train/input_wait'] for r in map(json.loads, lines) if 'train/loss' in r]
    assert len(shares) == 3
    assert all(0 <= share < 1 for share in shares)


def test_reading_ahead_changes_nothing(run, tmp_path):
    run(tmp_path / 'threads')
    run(tmp_path / 'none', 'train.prefetch=@Prefetch()', 'Prefetch.workers=0')
    assert records(tmp_path / 'threads') == records(tmp_path / 'none')


def test_a_run_does_not_go_on_with_other_data(run, tmp_path, texts):
    run(tmp_path / 'model', 'TRAIN_STEPS=2')
    (texts / '3.txt').unlink()
    with pytest.raises(ConfigError, match=r'the data has changed .*documents.*another MODEL_DIR'):
        run(tmp_path / 'model')
    (tmp_path / 'model/data.json').unlink()
    assert int(run(tmp_path / 'model').step) == 6


def test_a_run_with_other_rows_says_so(run, tmp_path, capsys):
    run(tmp_path / 'model', 'TRAIN_STEPS=2')
    run(tmp_path / 'model', 'BATCH_SIZE=16')
    assert 'batch_size was 8, and is 16' in capsys.readouterr().out


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
            'encoder_input_tokens.* no model for',
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
def test_settings_of_the_input_that_cannot_be_honoured(run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / 'model', *changes)
    assert not (tmp_path / 'model').exists()


def test_an_evaluation_of_other_tokens(run, tmp_path, sentencepiece_model):
    with pytest.raises(ConfigError, match="the evaluation 'own' uses the tokenizer"):
        run(
            tmp_path / 'model',
            "train.eval_tasks={'own': @own/CausalLM()}",
            'own/CausalLM.source=@TextFiles()',
            'own/CausalLM.tokenizer=@SentencePieceTokenizer()',
            f"SentencePieceTokenizer.path='{sentencepiece_model}'",
        )
    assert not (tmp_path / 'model').exists()
