"""The input of whole runs: packed rows, tokenizers, mixtures, several evaluations, the record."""

import json

import flax.linen as nn
import pytest
import sentencepiece
from small import model, partitioner, records, text_task

from partitioning import PjitPartitioner
from train import HeldOut, NextToken, Samples
from train.checkpoints import CheckpointConfig
from train.data import (
    CausalLM,
    JsonLines,
    Mixture,
    Prefetch,
    SentencePieceTokenizer,
    SpanCorruption,
    TextFiles,
)
from train.errors import ConfigError


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    prefix = tmp_path_factory.mktemp('tokenizer') / 'numbers'
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f'file {i} counts: {i} {i + 1} {i * i}' for i in range(400)),
        model_prefix=str(prefix),
        vocab_size=120,
        minloglevel=2,
    )
    return SentencePieceTokenizer(path=str(prefix.with_suffix('.model')))


@pytest.mark.long
def test_a_run_on_packed_rows_with_sentencepiece(run, tmp_path, texts, capsys, tokenizer):
    small = {'num_layers': 1, 'embed_dim': 16, 'num_heads': 2, 'num_kv_heads': 2, 'mlp_dim': 16}
    samples = Samples(length=12, prompts=['file 1'])
    state = run(
        tmp_path / 'model',
        objective=NextToken(model=model(**small)),
        task=text_task(texts, packing='pack', tokenizer=tokenizer),
        evaluators={'eval': HeldOut(), 'samples': samples},
    )
    assert int(state.step) == 6
    scores = records(tmp_path / 'model')[-1]
    # A token stands for several bytes, so there are more nats per token than nats per byte.
    assert scores['eval/bits_per_byte'] < scores['eval/loss'] / 0.6931
    assert scores['eval/bits_per_byte'] < 9, 'close to the 8 bits of a uniform guess, or better'
    printed = capsys.readouterr().out
    assert 'tokenized TextFiles *.txt' in printed
    assert '\nfile 1' in printed, 'the sample begins with its prompt'


def test_a_mixture_with_several_evaluations(run, tmp_path, texts):
    (texts / 'words.jsonl').write_text(
        ''.join(json.dumps({'body': f'word {i} ' * 9}) + '\n' for i in range(60))
    )
    source = JsonLines(pattern='*.jsonl', root=str(texts), field='body', holdout_percent=30.0)
    files, words = text_task(texts), CausalLM(source=source)
    run(
        tmp_path / 'model',
        task=Mixture(tasks=[files, words], weights=[3, 1]),
        evaluators={'files': HeldOut(task=files), 'words': HeldOut(task=words), 'all': HeldOut()},
    )
    scores = records(tmp_path / 'model')[-1]
    losses = sorted(scores[f'{name}/loss'] for name in ('files', 'words'))
    assert losses[0] < scores['all/loss'] < losses[1]
    record = json.loads((tmp_path / 'model/data.json').read_text())
    assert [part['weight'] for part in record['parts']] == [0.75, 0.25]
    assert [len(parts) for parts in record['evaluations'].values()] == [1, 1, 2]


def test_reading_ahead_changes_no_results(run, finished, tmp_path):
    model_dir = finished.copy(tmp_path / 'model', last_step=0)
    run(model_dir, prefetch=Prefetch(workers=0))
    assert records(model_dir) == records(finished.directory)
    for folder in (model_dir, finished.directory):
        lines = (folder / 'metrics.jsonl').read_text().splitlines()
        shares = [r['train/input_wait'] for r in map(json.loads, lines) if 'train/loss' in r]
        assert len(shares) == 6
        assert all(0 <= share < 1 for share in shares)


def test_a_run_resumes_only_with_the_same_data(run, tmp_path, texts, capsys):
    model_dir, once = tmp_path / 'model', {'checkpoints': CheckpointConfig(period=0)}
    run(model_dir, total_steps=2, **once)
    text = (texts / '3.txt').read_text()
    (texts / '3.txt').unlink()
    with pytest.raises(ConfigError, match=r'the data has changed .*documents.*another MODEL_DIR'):
        run(model_dir)
    (texts / '3.txt').write_text(text)
    run(model_dir, total_steps=3, batch_size=16, **once)
    assert 'batch_size changed from 8 to 16' in capsys.readouterr().out
    (texts / '3.txt').unlink()
    (model_dir / 'data.json').unlink()
    assert int(run(model_dir, batch_size=16, total_steps=4, **once).step) == 4


FSDP = {'partitioner': PjitPartitioner(layout='fsdp')}


def evaluating(**settings):
    return lambda texts: {'evaluators': {'own': HeldOut(task=text_task(texts, **settings))}}


def reading(kind=CausalLM, **settings):
    def change(texts):
        given = {'pattern': '*.txt', 'root': str(texts)} | settings.pop('source', {})
        return {'task': kind(source=TextFiles(**given), **settings)}

    return change


@pytest.mark.parametrize(
    'change, message',
    [
        (reading(source={'holdout_percent': 0.0}), 'nothing is held out'),
        (reading(source={'holdout_percent': 100.0}), 'no document to train on'),
        (reading(source={'pattern': []}), 'pattern is empty'),
        (reading(source={'root': 5}), 'root is 5: write '),
        (reading(cache_dir=5), 'cache_dir is 5'),
        (reading(tokenizer=SentencePieceTokenizer(path='no.model')), r'no\.model cannot be read'),
        (reading(SpanCorruption, num_sentinels=20), r'encoder_input_tokens.*CausalLM'),
        (evaluating(packing='pack'), "rows of the evaluator 'own' have .*decoder_segment_ids"),
        (lambda texts: {'sequence_length': None}, 'set sequence_length'),
        (lambda texts: {'objective': NextToken(model=model(vocab_size=256))}, 'vocab_size 256 '),
        (lambda texts: {'objective': NextToken(model=nn.Embed(200, 200)), **FSDP},
         'vocab_size 200 is smaller than the 257 tokens'),
        (lambda texts: {'evaluators': {'samples': Samples(prompts=['a'], length=1)}},
         "length .* is 1, but the prompt 'a' already has 1 tokens: use 2"),
        (lambda texts: {'partitioner': partitioner(8, 1, logical_axis_rules=[('batch', 'data')])},
         "no rule for logical axis '(embed|vocab)'"),
        (lambda texts: {'model_dir': __file__}, f'{__file__}.* is a file'),
    ],
)  # fmt: skip
def test_invalid_settings_of_the_input(run, tmp_path, texts, change, message):
    with pytest.raises(ValueError, match=message) as error:
        run(**{'model_dir': tmp_path / 'model'} | change(texts))
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'model').exists()


def test_an_evaluation_needs_the_same_tokenizer(run, tmp_path, texts, tokenizer):
    with pytest.raises(ConfigError, match="the evaluator 'own' uses the tokenizer sentencepiece"):
        run(tmp_path / 'model', **evaluating(tokenizer=tokenizer)(texts))
    assert not (tmp_path / 'model').exists()
