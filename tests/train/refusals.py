"""Helpers that return the error message of a bad source and check its form."""

import tempfile

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from train.data import ByteTokenizer, Tokenizer, open_index
from train.errors import ConfigError


class TextOnlyTokenizer(Tokenizer):
    """A tokenizer that accepts only UTF-8, like subword tokenizers, but needs no model."""

    num_tokens = 257
    separator = 256
    identity = 'text'

    def encode(self, names, contents):
        from train.data.text.tokenizers import as_texts

        return ByteTokenizer().encode(names, [t.encode() for t in as_texts(names, contents)])

    def decode(self, tokens):
        return ByteTokenizer().decode(tokens)


def refusal(cache, open_source, tokenizer=None):
    """Returns the error message of a source, and checks that no files remain.

    The cache may keep lock files only, and the folder of temporary files must be empty.

    Args:
      cache: the folder of the cache.
      open_source: the source, or a function that returns it.
      tokenizer: the tokenizer, by default `ByteTokenizer()`.
    """
    temporary = cache.with_name(f'{cache.name} temporary')
    temporary.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(tempfile, 'tempdir', str(temporary))
        source = open_source() if callable(open_source) else open_source
        open_index(source, tokenizer or ByteTokenizer(), str(cache), lambda *progress: None)
    # gin appends a second line, which the command line removes.
    message = str(caught.value).split('\n  In call to configurable')[0]
    assert len(message.splitlines()) == 1, message
    assert len(message) < 500, message
    if cache.is_dir():
        assert [p.name for p in cache.iterdir() if p.suffix != '.lock'] == []
    del caught  # Its frames hold a temporary folder.
    assert list(temporary.iterdir()) == []
    return message


def file_refusal(tmp_path, kind, name, content, **settings):
    """Returns the error message of a file with this content; it must name the file."""
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / name).write_bytes(content)
    source = kind(pattern='*', root=str(tmp_path / 'data'), holdout_percent=0, **settings)
    message = refusal(tmp_path / 'cache', source)
    assert name in message
    return message


def write_array_record(path, records):
    writer = ArrayRecordWriter(str(path), 'group_size:1')
    for record in records:
        writer.write(record)
    writer.close()
