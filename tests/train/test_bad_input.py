"""Bad input ends in one clear line that names the file and the place, and leaves nothing behind."""

import gzip
import importlib
import json
import os
import re
import sys
import tempfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from train.data import (
    ArrayRecords,
    ByteTokenizer,
    HuggingFaceTokenizer,
    JsonLines,
    ParquetFiles,
    Records,
    SentencePieceTokenizer,
    TextFiles,
    Tokenizer,
    open_index,
)
from train.errors import ConfigError

pytestmark = pytest.mark.core

# Random, so that a part of it cannot be told from the rest.
TEXT = np.random.default_rng(0).integers(32, 127, 5000, np.uint8).tobytes()
GZIP = gzip.compress(TEXT, mtime=0)
ZSTANDARD = zstandard.ZstdCompressor(write_checksum=True).compress(TEXT)


class TakesText(Tokenizer):
    """Refuses as every tokenizer of text does, without a model."""

    num_tokens = 257
    separator = 256
    identity = 'text'

    def encode(self, names, contents):
        from train.data.text.tokenizers import as_texts

        return ByteTokenizer().encode(names, [t.encode() for t in as_texts(names, contents)])

    def decode(self, tokens):
        return ByteTokenizer().decode(tokens)


def refusal(cache, open_source, tokenizer=None):
    """The message; nothing but locks may be left in the cache, nor anything among temporary files.

    Args:
      open_source: makes the source, or is it.
    """
    temporary = cache.with_name(f'{cache.name} temporary')
    temporary.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(tempfile, 'tempdir', str(temporary))
        source = open_source() if callable(open_source) else open_source
        open_index(source, tokenizer or ByteTokenizer(), str(cache), lambda *progress: None)
    # gin adds a second line, which the command line takes off again.
    message = str(caught.value).split('\n  In call to configurable')[0]
    assert len(message.splitlines()) == 1, message
    assert len(message) < 500, message
    if cache.is_dir():
        assert [p.name for p in cache.iterdir() if p.suffix != '.lock'] == []
    del caught  # and with it the frames that hold a temporary folder
    assert list(temporary.iterdir()) == []
    return message


def file_refusal(tmp_path, kind, name, content, **settings):
    """The message for a file with this content."""
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / name).write_bytes(content)
    source = kind(pattern='*', root=str(tmp_path / 'data'), holdout_percent=0, **settings)
    message = refusal(tmp_path / 'cache', source)
    assert name in message
    return message


# Nothing there.


def test_no_matching_file_names_pattern_and_place(tmp_path):
    source = TextFiles(pattern=['*.txt', 'b/*'], exclude='/test/', root=str(tmp_path / 'here'))
    message = refusal(tmp_path / 'cache', source)
    where = (str(tmp_path / 'here'), 'no folder')
    assert all(part in message for part in ("'*.txt'", '/test/', *where))
    (tmp_path / 'here').mkdir()
    (tmp_path / 'here/a.txt').write_text('one pattern of two matches')
    message = refusal(tmp_path / 'cache', source)
    assert "'b/*'" in message and '*.txt' not in message


@pytest.mark.parametrize('records', [[], ['', '']])
def test_records_without_a_byte_are_an_empty_corpus(tmp_path, records):
    message = refusal(tmp_path / 'cache', Records(records=records, cache_key='none'))
    assert 'empty' in message
    assert ('2' if records else 'no documents') in message


def test_files_without_a_byte_are_an_empty_corpus(tmp_path):
    for i in range(100):
        (tmp_path / f'{i}.txt').touch()
    source = TextFiles(pattern='*.txt', root=str(tmp_path), holdout_percent=50)
    message = refusal(tmp_path / 'cache', source)
    assert 'empty' in message
    assert '100' in message


@pytest.mark.parametrize('percent', [-1, 100.5, 200, float('nan'), '2', None])
def test_a_share_held_out_beyond_its_range(tmp_path, percent):
    (tmp_path / 'a').write_bytes(b'a')
    message = refusal(
        tmp_path / 'cache',
        lambda: TextFiles(pattern='a', root=str(tmp_path), holdout_percent=percent),
    )
    assert 'TextFiles.holdout_percent' in message
    assert repr(percent) in message


# JSON.


@pytest.mark.parametrize(
    ('line', 'say'),
    [
        (b'{"text": "x"', 'JSON'),
        (b'plain text', 'JSON'),
        (b'{"text": "x"} {"text": "y"}', 'JSON'),
        (b'{"text": "cut', 'JSON'),
        (b'[' * 200_000, 'JSON'),  # deeper than Python's stack
        (b'["x"]', r'\["x"\], not an object'),
        (b'7', '7, not an object'),
        (b'null', 'null, not an object'),
        (b'{"txt": "x"}', "no 'text', only 'txt'.*Did you mean 'txt'"),
        (b'{}', "no 'text'"),
        (b'{"text": null}', "'text'.*null"),
        (b'{"text": 7}', "'text'.*7"),
        (b'{"text": ["x"]}', "'text'.*'x'"),
        (b'{"text": "x\xff"}', 'UTF-8.*byte 11'),
        (b'{"text": "x\\ud83d"}', 'surrogate.*character 1'),
        (b'{"text": "x\xed\xa0\xbd"}', 'UTF-8|surrogate'),
    ],
)
def test_a_bad_line_of_json(tmp_path, line, say):
    content = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'
    message = file_refusal(tmp_path, JsonLines, 'b.jsonl', content)
    assert 'b.jsonl:3' in message
    assert re.search(say, message), message


def test_an_object_of_many_fields_names_the_nearest(tmp_path):
    record = {f'field{i}': 'x' for i in range(50)} | {'contents': 'x'}
    content = json.dumps(record).encode()
    message = file_refusal(tmp_path, JsonLines, 'b.jsonl', content, field='content')
    assert re.search(r"b\.jsonl:1 has no 'content'.*Did you mean 'contents'", message)


# Bytes that are no text.


@pytest.mark.parametrize('kind', ['text', 'JSON lines', 'Parquet', 'ArrayRecord', 'records'])
def test_bytes_that_are_no_utf8_for_a_tokenizer_of_text(tmp_path, kind):
    root, bad = tmp_path / 'data', b'good \xff bad'
    root.mkdir()
    where = {'pattern': '*', 'root': str(root), 'holdout_percent': 0}
    if kind == 'text':
        (root / 'a.txt').write_bytes(b'good')
        (root / 'b.txt').write_bytes(bad)
        source, place = TextFiles(**where), r'b\.txt'
    elif kind == 'JSON lines':
        # Bytes of a file of JSON are checked as they are read: no tokenizer takes them.
        (root / 'b.jsonl').write_bytes(b'{"text": "good"}\n{"text": "' + bad + b'"}')
        source, place = JsonLines(**where), r'b\.jsonl:2'
        bad = b'{"text": "' + bad
    elif kind == 'Parquet':
        table = pyarrow.table({'text': [b'good', bad]})
        pyarrow.parquet.write_table(table, root / 'b.parquet')
        source, place = ParquetFiles(**where), r'b\.parquet.*1'
    elif kind == 'ArrayRecord':
        write_array_record(root / 'b.array_record', [b'good', bad])
        source, place = ArrayRecords(**where), r'b\.array_record.*1'
    else:
        source, place = Records(records=[b'good', bad], holdout_percent=0), r'record 1\b'
    message = refusal(tmp_path / 'cache', source, TakesText())
    assert re.search(rf'{place} .*UTF-8.* byte {bad.index(0xFF)}\b', message), message
    if kind != 'JSON lines':
        assert 'ByteTokenizer' in message
        taken = open_index(source, ByteTokenizer(), str(tmp_path / 'bytes'), lambda *p: None)
        assert bytes(taken.training.tokens[-len(bad) - 1 : -1].astype(np.uint8)) == bad


# Compressed files.


@pytest.mark.parametrize('length', [0, 1, 9, 10, 40, len(GZIP) // 2, len(GZIP) - 8, len(GZIP) - 1])
def test_a_gzip_file_cut_off(tmp_path, length):
    # No byte at all is no gzip file either: `gzip -t` refuses it, and a download that failed is so.
    assert 'gzip' in file_refusal(tmp_path, TextFiles, 'b.gz', GZIP[:length])


@pytest.mark.parametrize('length', [0, 1, 3, 5, 40, len(ZSTANDARD) // 2, len(ZSTANDARD) - 1])
def test_a_zstandard_file_cut_off(tmp_path, length):
    assert 'zstandard' in file_refusal(tmp_path, TextFiles, 'b.zst', ZSTANDARD[:length])


@pytest.mark.parametrize(
    ('ending', 'content'), [('gz', GZIP), ('zst', ZSTANDARD)], ids=['gzip', 'zstandard']
)
@pytest.mark.parametrize('damage', ['magic', 'middle', 'checksum', 'behind', 'plain'])
def test_a_damaged_compressed_file(tmp_path, ending, content, damage):
    damaged = bytearray(content)
    places = {'magic': 0, 'middle': len(content) // 2, 'checksum': -6 if ending == 'gz' else -2}
    if damage in places:
        damaged[places[damage]] ^= 0x40
    elif damage == 'behind':
        damaged += b'something else'
    else:
        damaged = TEXT
    message = file_refusal(tmp_path, TextFiles, f'b.{ending}', bytes(damaged))
    assert {'gz': 'gzip', 'zst': 'zstandard'}[ending] in message


def test_json_lines_in_a_damaged_file_name_it(tmp_path):
    lines = b''.join(
        b'{"text": "%d"}\n' % i for i in np.random.default_rng(0).integers(0, 9**9, 999)
    )
    content = gzip.compress(lines)
    assert 'gzip' in file_refusal(tmp_path, JsonLines, 'b.jsonl.gz', content[: len(content) // 2])


# Parquet and ArrayRecord.


def parquet_bytes(column, name='text'):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({name: column}), sink, use_dictionary=False)
    return sink.getvalue().to_pybytes()


ROWS = [f'{i} {n:x}' for i, n in enumerate(np.random.default_rng(0).integers(0, 1 << 60, 3000))]


@pytest.mark.parametrize('damage', ['empty', 'other', 'cut', 'middle', 'footer'])
def test_a_damaged_parquet_file(tmp_path, damage):
    content = parquet_bytes(ROWS)
    damaged = {
        'empty': b'',
        'other': TEXT,
        'cut': content[: len(content) // 2],
        'middle': content[:200] + b'\xff' * 4000 + content[4200:],
        'footer': content[:-100] + b'\xff' * 92 + content[-8:],
    }[damage]
    assert 'Parquet' in (m := file_refusal(tmp_path, ParquetFiles, 'b.parquet', damaged)) or (
        'damaged' in m
    )


@pytest.mark.parametrize(
    ('column', 'say'),
    [
        (['a', None], 'row 1.*null'),
        ([7], 'row 0.*7'),
        ([{'text': 'a'}], 'row 0'),
        ([['a']], 'row 0'),
    ],
)
def test_a_parquet_row_that_is_no_text(tmp_path, column, say):
    message = file_refusal(tmp_path, ParquetFiles, 'b.parquet', parquet_bytes(column))
    assert re.search(say, message), message


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    message = file_refusal(tmp_path, ParquetFiles, 'b.parquet', parquet_bytes(['a'], 'texts'))
    assert re.search("no 'text', only 'texts'.*Did you mean 'texts'", message)


def test_a_parquet_string_that_is_no_utf8_is_bytes_and_no_text(tmp_path):
    # Parquet does not check strings, so other writers leave such rows.
    offsets, content = np.array([0, 4, 6], np.int32), b'good\xff\xfe'
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(content)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    (tmp_path / 'b.parquet').write_bytes(parquet_bytes(column))
    source = ParquetFiles(pattern='b.parquet', root=str(tmp_path), holdout_percent=0)
    listed = list(source.listing().documents)
    assert [document.content for document in listed] == [b'good', b'\xff\xfe']
    message = refusal(tmp_path / 'cache', source, TakesText())
    assert re.search('b.parquet:1 is not UTF-8', message), message


def write_array_record(path, records):
    writer = ArrayRecordWriter(str(path), 'group_size:1')
    for record in records:
        writer.write(record)
    writer.close()


@pytest.mark.parametrize('damage', ['empty', 'other', 'cut', 'middle'])
def test_a_damaged_array_record_file(tmp_path, damage):
    write_array_record(tmp_path / 'good', [row.encode() * 50 for row in ROWS])
    content = (tmp_path / 'good').read_bytes()
    half = len(content) // 2
    damaged = {
        'empty': b'',
        'other': TEXT * 20,
        'cut': content[:half],
        'middle': content[:half] + b'\xff' * 4000 + content[half + 4000 :],
    }[damage]
    message = file_refusal(tmp_path, ArrayRecords, 'b.array_record', damaged)
    assert 'ArrayRecord' in message


def test_an_array_record_that_is_no_json_object(tmp_path):
    write_array_record(tmp_path / 'b', [b'{"text": "a"}', b'{"text": 7}'])
    where = {'pattern': 'b', 'root': str(tmp_path)}
    message = refusal(tmp_path / 'cache', ArrayRecords(field='text', **where))
    assert re.search(r"/b.*record 1.*'text'.*7", message), message
    message = refusal(tmp_path / 'cache', ArrayRecords(field='body', **where))
    assert re.search(r"/b.*record 0 has no 'body'", message), message


# Records.


@pytest.mark.parametrize(
    ('record', 'say'),
    [
        (None, 'null|None'),
        (7, '7'),
        (['a'], "'a'"),
        ({'txt': 'a'}, "no 'text', only 'txt'.*Did you mean 'txt'"),
        ({'text': None}, "'text'.*null"),
        ('\ud83d', 'surrogate'),
    ],
)
def test_a_record_that_is_no_text(tmp_path, record, say):
    message = refusal(tmp_path / 'cache', Records(records=['a', record], cache_key='bad'))
    assert re.search(rf'record 1\b.*({say})', message), message


@pytest.mark.parametrize('records', [7, None, iter('ab'), {'a': 'b'}, 'one text'], ids=repr)
def test_records_that_are_no_sequence_of_records(tmp_path, records):
    # A mapping has no first item, and a text is one document, not one for each letter.
    message = refusal(tmp_path / 'cache', lambda: Records(records=records))
    assert type(records).__name__ in message


# Files that cannot be read.


@pytest.mark.skipif(not hasattr(os, 'geteuid') or os.geteuid() == 0, reason='root reads all files')
@pytest.mark.parametrize('kind', [TextFiles, JsonLines, ParquetFiles, ArrayRecords])
def test_a_file_without_permission(tmp_path, kind):
    (tmp_path / 'secret').write_bytes(b'x')
    (tmp_path / 'secret').chmod(0)
    message = refusal(tmp_path / 'cache', kind(pattern='secret', root=str(tmp_path)))
    assert re.search('secret.*ermission', message), message


@pytest.mark.skipif(not os.path.exists('/proc/self/mem'), reason='needs a file that fails to read')
@pytest.mark.parametrize('kind', [TextFiles, JsonLines, ParquetFiles, ArrayRecords])
def test_a_file_that_fails_while_it_is_read(tmp_path, kind):
    # The first page of a process's memory is never mapped, so reading it is an error.
    assert '/proc/self/mem' in refusal(tmp_path / 'cache', kind(pattern='/proc/self/mem'))


@pytest.mark.parametrize('kind', [TextFiles, JsonLines, ParquetFiles, ArrayRecords])
def test_a_file_that_goes_away_between_listing_and_reading(tmp_path, kind):
    (tmp_path / 'gone').write_bytes(b'x')
    source = kind(pattern='gone', root=str(tmp_path))

    class Listed(kind):
        def listing(self):
            listing = source.listing()
            (tmp_path / 'gone').unlink()
            return listing

    message = refusal(tmp_path / 'cache', Listed(pattern='gone'))
    assert re.search(r'gone.*No such file', message), message


# Packages that are not installed.


def without(monkeypatch, *packages):
    load = importlib.import_module

    def missing(name, *args):
        if name.split('.')[0] in packages:
            raise ImportError(f'No module named {name!r}')
        return load(name, *args)

    monkeypatch.setattr(importlib, 'import_module', missing)
    for name in [n for n in sys.modules if n.split('.')[0] in packages]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ('kind', 'package', 'extra', 'name'),
    [
        (ParquetFiles, 'pyarrow', 'data', 'a.parquet'),
        (TextFiles, 'zstandard', 'data', 'a.zst'),
        (JsonLines, 'zstandard', 'data', 'a.jsonl.zst'),
        (ArrayRecords, 'array_record', 'train', 'a.array_record'),
    ],
)
def test_a_source_without_its_package_names_the_extra(
    tmp_path, monkeypatch, kind, package, extra, name
):
    (tmp_path / name).write_bytes(ZSTANDARD)
    without(monkeypatch, package)
    message = refusal(tmp_path / 'cache', kind(pattern='*', root=str(tmp_path)))
    assert package in message
    assert f"pip install 'meshwright[{extra}]'" in message


@pytest.mark.parametrize(
    ('kind', 'package'),
    [(SentencePieceTokenizer, 'sentencepiece'), (HuggingFaceTokenizer, 'tokenizers')],
)
def test_a_tokenizer_without_its_package_names_the_extra(tmp_path, monkeypatch, kind, package):
    (tmp_path / 'model').write_bytes(b'{}')
    without(monkeypatch, package)
    source = Records(records=['a'], cache_key='a')
    message = refusal(tmp_path / 'cache', source, kind(path=str(tmp_path / 'model')))
    assert f'the package {package}' in message
    assert "pip install 'meshwright[tokenizers]'" in message


# Files of tokenizers.


@pytest.mark.parametrize('content', [None, 'folder', b'', b'garbage', b'\xff\xfe', b'{}'], ids=repr)
@pytest.mark.parametrize(
    ('kind', 'say'),
    [(SentencePieceTokenizer, 'no SentencePiece model'), (HuggingFaceTokenizer, 'no tokenizer')],
)
def test_a_file_that_is_no_tokenizer(tmp_path, kind, say, content):
    path = tmp_path / 'model'
    if content == 'folder':
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    expected = {None: 'No such file', 'folder': 'Is a directory'}.get(content, say)
    source = Records(records=['a'], cache_key='a')
    messages = [refusal(tmp_path / 'cache', source, kind(path=str(path)))]
    with pytest.raises(ConfigError) as caught:
        print(kind(path=str(path)).num_tokens)
    messages.append(str(caught.value))
    for message in messages:
        assert expected in message
        assert message.count(str(path)) == 1, 'told twice'
