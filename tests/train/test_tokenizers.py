"""Tokenizers: bytes, SentencePiece models and tokenizer.json files of Hugging Face."""

import io
import json
import shutil

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from train.data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Records,
    SentencePieceTokenizer,
    open_index,
)
from train.data.text.tokenizers import SEPARATORS
from train.errors import ConfigError

pytestmark = pytest.mark.core

LINES = [f'the quick brown fox number {i} jumps over {i * 7} lazy dogs' for i in range(200)]
TEXTS = ['the quick fox', '', 'dogs  jump\n\tover', 'naïve Ω \U0001f600', LINES[3], 'a\u2028b']


def train_sentencepiece(**settings):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, minloglevel=2, **settings
    )
    return model.getvalue()


def train_hugging_face(special=('<|endoftext|>', '<pad>'), size=400):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """A directory of tokenizer models."""
    folder = tmp_path_factory.mktemp('models')
    pieces = {
        'fallback': {'vocab_size': 330, 'byte_fallback': True},
        'smaller': {'vocab_size': 320, 'byte_fallback': True},
        'plain': {'vocab_size': 60},
        'no-end': {'vocab_size': 60, 'eos_id': -1},
        'no-begin-no-end': {'vocab_size': 60, 'eos_id': -1, 'bos_id': -1},
    }
    for name, how in pieces.items():
        (folder / f'{name}.model').write_bytes(train_sentencepiece(**how))
    train_hugging_face().save(str(folder / 'bpe.json'))
    train_hugging_face(size=380).save(str(folder / 'smaller.json'))
    train_hugging_face(['[SEP]', '</s>', '<pad>']).save(str(folder / 'two-separators.json'))
    train_hugging_face(['<pad>', '<turn>']).save(str(folder / 'no-separator.json'))
    return folder


def sentence_piece(made, name='fallback'):
    return SentencePieceTokenizer(path=str(made / f'{name}.model'))


def hugging_face(made, name='bpe', **settings):
    return HuggingFaceTokenizer(path=str(made / f'{name}.json'), **settings)


def every(made):
    return [
        ByteTokenizer(),
        *(sentence_piece(made, name) for name in ('fallback', 'plain', 'no-end')),
        *(hugging_face(made, name) for name in ('bpe', 'two-separators')),
    ]


def encode(tokenizer, texts):
    contents = [t if isinstance(t, bytes) else t.encode() for t in texts]
    return tokenizer.encode([f'document {i}' for i in range(len(texts))], contents)


# All tokenizers.


def test_tokens_and_separators_are_below_the_number_of_tokens(made):
    for tokenizer in every(made):
        tokens = np.concatenate(encode(tokenizer, [*TEXTS, ''.join(map(chr, range(1, 400)))]))
        assert tokens.min() >= 0
        assert tokens.max() < tokenizer.num_tokens, tokenizer
        assert 0 <= tokenizer.separator < tokenizer.num_tokens, tokenizer
        assert tokenizer.separator not in tokens, tokenizer


def test_documents_are_encoded_independently(made):
    for tokenizer in every(made):
        together = encode(tokenizer, TEXTS)
        assert len(together) == len(TEXTS)
        for text, tokens in zip(TEXTS, together, strict=True):
            np.testing.assert_array_equal(tokens, encode(tokenizer, [text])[0])
        assert together[1].shape == (0,)


def test_separators_decode_to_nothing(made):
    for tokenizer in every(made):
        for text in ('the quick fox', 'number 7', ''):
            tokens = encode(tokenizer, [text])[0].tolist()
            stream = np.array([tokenizer.separator, *tokens, tokenizer.separator], np.uint16)
            assert tokenizer.decode(stream) == text.encode(), tokenizer


def test_documents_decode_one_after_another(made):
    # `Stream.head` and the baselines decode documents like this to count their bytes.
    for tokenizer in every(made):
        tokens = [tokenizer.separator]
        for document in encode(tokenizer, ['the quick', 'brown', 'fox']):
            tokens += [*document.tolist(), tokenizer.separator]
        assert tokenizer.decode(np.array(tokens)) == b'the quickbrownfox', tokenizer


def test_text_that_looks_like_a_separator_stays_text(made):
    # These models lose unknown characters, because they have no pieces for bytes.
    lossy = [sentence_piece(made, 'plain'), sentence_piece(made, 'no-end')]
    for tokenizer in every(made):
        for written in (*SEPARATORS, '<s>', '<pad>', '<unk>'):
            text = f'fox{written}dogs'
            tokens = encode(tokenizer, [text])[0]
            assert tokenizer.separator not in tokens, (tokenizer, written)
            if tokenizer not in lossy:
                assert tokenizer.decode(tokens) == text.encode(), (tokenizer, written)


def test_identities_are_unique_and_stable(made, tmp_path):
    tokenizers_ = [*every(made), sentence_piece(made, 'smaller'), hugging_face(made, 'smaller')]
    tokenizers_.append(hugging_face(made, 'two-separators', separator_token='[SEP]'))
    identities = [tokenizer.identity for tokenizer in tokenizers_]
    assert len(set(identities)) == len(identities)
    again = [*every(made), sentence_piece(made, 'smaller'), hugging_face(made, 'smaller')]
    assert [tokenizer.identity for tokenizer in again] == identities[:-1]
    for tokenizer in (sentence_piece(made), hugging_face(made)):
        copy = tmp_path / 'copy'
        shutil.copy(tokenizer.path, copy)
        assert type(tokenizer)(path=str(copy)).identity == tokenizer.identity, (
            'the identity must not depend on the path'
        )


def test_invalid_utf8_names_the_document_and_the_byte(made):
    for tokenizer in (sentence_piece(made), hugging_face(made)):
        with pytest.raises(ConfigError, match=r'^document 1 is not UTF-8.* byte 7\b') as caught:
            encode(tokenizer, ['good', 'naïve \udcff'.encode(errors='surrogateescape')])
        assert '\n' not in str(caught.value)
    assert encode(ByteTokenizer(), [b'\xff\x00'])[0].tolist() == [255, 0]


def test_a_tilde_stands_for_the_home_directory(made, monkeypatch):
    monkeypatch.setenv('HOME', str(made))
    assert SentencePieceTokenizer(path='~/plain.model').num_tokens == 60
    assert HuggingFaceTokenizer(path='~/bpe.json').num_tokens == hugging_face(made).num_tokens


# Bytes.


@given(st.lists(st.binary(max_size=50), max_size=5))
@settings(max_examples=50)
def test_bytes_are_their_own_tokens(contents):
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode([''] * len(contents), contents)
    assert [tokens.tolist() for tokens in encoded] == [list(content) for content in contents]
    stream = [256] + [t for content in contents for t in [*content, 256]]
    assert tokenizer.decode(np.array(stream, np.uint16)) == b''.join(contents)
    assert (tokenizer.num_tokens, tokenizer.separator) == (257, 256)


# SentencePiece.


@pytest.mark.parametrize('name', ['fallback', 'plain', 'no-end'])
def test_sentencepiece_tokens_match_the_package(made, name):
    tokenizer = sentence_piece(made, name)
    package = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path)
    for text, tokens in zip(TEXTS, encode(tokenizer, TEXTS), strict=True):
        assert tokens.tolist() == package.encode(text), 'there must be no begin or end token'
    assert tokenizer.num_tokens == package.get_piece_size()
    assert tokenizer.separator == package.piece_to_id('<s>' if name == 'no-end' else '</s>')


def test_sentencepiece_decodes_text_up_to_normalization(made):
    tokenizer = sentence_piece(made)
    for text, tokens in zip(TEXTS, encode(tokenizer, TEXTS), strict=True):
        # The model normalizes with NFKC and joins consecutive spaces.
        assert tokenizer.decode(tokens).decode().split() == text.split()


def test_a_sentencepiece_model_without_begin_and_end_has_no_separator(made):
    with pytest.raises(ConfigError, match=r'begin-no-end\.model has neither.*separate'):
        sentence_piece(made, 'no-begin-no-end').separator  # noqa: B018


# Hugging Face.


def test_hugging_face_tokens_match_the_package(made):
    tokenizer = hugging_face(made)
    package = tokenizers.Tokenizer.from_file(tokenizer.path)
    for text, tokens in zip(TEXTS, encode(tokenizer, TEXTS), strict=True):
        assert tokens.tolist() == package.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokens) == text.encode()
    assert tokenizer.num_tokens == package.get_vocab_size()
    assert tokenizer.separator == package.token_to_id('<|endoftext|>')


def test_truncation_padding_and_templates_of_the_file_are_ignored(made, tmp_path):
    package = train_hugging_face()
    package.enable_truncation(3)
    package.enable_padding(length=64, pad_id=1, pad_token='<pad>')
    package.post_processor = processors.TemplateProcessing(
        single='<|endoftext|> $A <|endoftext|>', special_tokens=[('<|endoftext|>', 0)]
    )
    package.save(str(tmp_path / 'set.json'))
    assert len(package.encode(LINES[3]).ids) == 64
    plain, with_settings = hugging_face(made), HuggingFaceTokenizer(path=str(tmp_path / 'set.json'))
    assert max(map(len, encode(plain, TEXTS))) > 3
    for expected, tokens in zip(encode(plain, TEXTS), encode(with_settings, TEXTS), strict=True):
        assert tokens.tolist() == expected.tolist()


def test_the_separator_is_the_given_token_or_the_first_common_one(made):
    package = tokenizers.Tokenizer.from_file(str(made / 'two-separators.json'))
    assert hugging_face(made, 'two-separators').separator == package.token_to_id('</s>')
    named = hugging_face(made, 'two-separators', separator_token='[SEP]')
    assert named.separator == package.token_to_id('[SEP]')
    assert hugging_face(made, 'no-separator', separator_token='<turn>').separator == 1


@pytest.mark.parametrize(
    ('name', 'token', 'expected'), [('no-separator', None, '<eos>'), ('bpe', '</s>', '</s>')]
)
def test_a_missing_separator(made, name, token, expected):
    with pytest.raises(ConfigError, match='separator_token') as caught:
        hugging_face(made, name, separator_token=token).separator  # noqa: B018
    assert f'{name}.json has no special token' in str(caught.value)
    assert expected in str(caught.value)


def test_a_vocabulary_without_its_own_unknown_token_is_refused(tmp_path):
    package = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, unk_token='gone'))
    package.save(str(tmp_path / 'words.json'))
    with pytest.raises(ConfigError, match=r'words\.json cannot encode texts: .*'):
        encode(hugging_face(tmp_path, 'words'), ['b'])


@pytest.mark.parametrize('kind', ['a word', 'undeclared'])
def test_a_token_that_documents_contain_cannot_separate(made, tmp_path, kind):
    # A word's token also occurs in documents. A token that the file does not declare as special
    # would be decoded as text. In both cases there must be an error or a working separator.
    if kind == 'a word':
        tokenizer = hugging_face(made, separator_token='the')
    else:
        file = json.loads((made / 'bpe.json').read_text()) | {'added_tokens': []}
        (tmp_path / 'undeclared.json').write_text(json.dumps(file))
        tokenizer = HuggingFaceTokenizer(path=str(tmp_path / 'undeclared.json'))
    try:
        separator = tokenizer.separator
    except ConfigError as error:
        assert 'separat' in str(error)
        return
    assert separator not in encode(tokenizer, ['the', 'over the'])[0]
    assert tokenizer.decode(np.array([separator])) == b''


def test_added_tokens_count_in_the_vocabulary(made, tmp_path):
    package = train_hugging_face()
    package.add_tokens(['zzz'])
    package.save(str(tmp_path / 'added.json'))
    tokenizer = HuggingFaceTokenizer(path=str(tmp_path / 'added.json'))
    assert tokenizer.num_tokens == hugging_face(made).num_tokens + 1
    assert encode(tokenizer, ['a zzz'])[0].max() == tokenizer.num_tokens - 1


# Tokenizers of an index.


def test_the_head_of_a_stream_counts_the_bytes_of_its_documents(made, tmp_path):
    texts = ['the quick', 'brown fox', 'jumps over', 'lazy dogs']
    source = Records(records=texts, holdout_percent=0)
    for tokenizer in every(made):
        stream = open_index(source, tokenizer, str(tmp_path), lambda *progress: None).training
        for count in range(1, len(texts) + 1):
            head = stream.head(int(stream.starts[count]), tokenizer)
            assert head.num_documents == count
            assert head.num_bytes == sum(map(len, texts[:count])), (tokenizer, count)
