"""Bad input is refused in one line that names the file and the place, and leaves no files."""

import gzip
import json
import os
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from refusals import TextOnlyTokenizer, file_refusal, refusal, write_array_record

from train.data import (
    ArrayRecords,
    ByteTokenizer,
    JsonLines,
    ParquetFiles,
    Records,
    TextFiles,
    open_index,
)

pytestmark = pytest.mark.core

# Random, so that damage cannot go unnoticed.
TEXT = np.random.default_rng(0).integers(32, 127, 5000, np.uint8).tobytes()
GZIP = gzip.compress(TEXT, mtime=0)
ZSTANDARD = zstandard.ZstdCompressor(write_checksum=True).compress(TEXT)


# Nothing to read.


def test_no_matching_file(tmp_path):
    source = TextFiles(pattern=['*.txt', 'b/*'], exclude='/test/', root=str(tmp_path / 'here'))
    message = refusal(tmp_path / 'cache', source)
    where = (str(tmp_path / 'here'), 'not a directory')
    assert all(part in message for part in ("'*.txt'", '/test/', *where))
    (tmp_path / 'here').mkdir()
    (tmp_path / 'here/a.txt').write_text('one pattern of two matches')
    message = refusal(tmp_path / 'cache', source)
    assert "'b/*'" in message and '*.txt' not in message


@pytest.mark.parametrize('records', [[], ['', '']])
def test_records_without_text(tmp_path, records):
    message = refusal(tmp_path / 'cache', Records(records=records, cache_key='none'))
    assert 'empty' in message
    assert ('2' if records else 'no documents') in message


def test_empty_files(tmp_path):
    for i in range(100):
        (tmp_path / f'{i}.txt').touch()
    source = TextFiles(pattern='*.txt', root=str(tmp_path), holdout_percent=50)
    message = refusal(tmp_path / 'cache', source)
    assert 'empty' in message
    assert '100' in message


@pytest.mark.parametrize('percent', [-1, 100.5, 200, float('nan'), '2', None])
def test_an_invalid_holdout_percent(tmp_path, percent):
    (tmp_path / 'a').write_bytes(b'a')
    message = refusal(
        tmp_path / 'cache',
        lambda: TextFiles(pattern='a', root=str(tmp_path), holdout_percent=percent),
    )
    assert 'TextFiles.holdout_percent' in message
    assert repr(percent) in message


# JSON.


@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        (b'{"text": "x"', 'JSON'),
        (b'plain text', 'JSON'),
        (b'{"text": "x"} {"text": "y"}', 'JSON'),
        (b'{"text": "cut', 'JSON'),
        (b'[' * 200_000, 'JSON.*64 deep'),  # deeper than Python's stack
        (b'{"text": ' + b'[' * 64 + b']' * 64 + b'}', 'JSON.*64 deep'),
        (b'{"text": ' + b'[' * 63 + b']' * 63 + b'}', 'not text'),
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
def test_a_bad_line_of_json(tmp_path, line, expected):
    content = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'
    message = file_refusal(tmp_path, JsonLines, 'b.jsonl', content)
    assert 'b.jsonl:3' in message
    assert re.search(expected, message), message


def test_a_missing_field_names_the_nearest_one(tmp_path):
    record = {f'field{i}': 'x' for i in range(50)} | {'contents': 'x'}
    content = json.dumps(record).encode()
    message = file_refusal(tmp_path, JsonLines, 'b.jsonl', content, field='content')
    assert re.search(r"b\.jsonl:1 has no 'content'.*Did you mean 'contents'", message)


# Bytes that are not text.


@pytest.mark.parametrize('kind', ['text', 'JSON lines', 'Parquet', 'ArrayRecord', 'records'])
def test_invalid_utf8_for_a_tokenizer_of_text(tmp_path, kind):
    root, bad = tmp_path / 'data', b'good \xff bad'
    root.mkdir()
    where = {'pattern': '*', 'root': str(root), 'holdout_percent': 0}
    if kind == 'text':
        (root / 'a.txt').write_bytes(b'good')
        (root / 'b.txt').write_bytes(bad)
        source, place = TextFiles(**where), r'b\.txt'
    elif kind == 'JSON lines':
        # JSON is decoded while it is read, so it must be UTF-8 for every tokenizer.
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
    message = refusal(tmp_path / 'cache', source, TextOnlyTokenizer())
    assert re.search(rf'{place} .*UTF-8.* byte {bad.index(0xFF)}\b', message), message
    if kind != 'JSON lines':
        assert 'ByteTokenizer' in message
        taken = open_index(source, ByteTokenizer(), str(tmp_path / 'bytes'), lambda *p: None)
        assert bytes(taken.training.tokens[-len(bad) - 1 : -1].astype(np.uint8)) == bad


# Compressed files.


@pytest.mark.parametrize('length', [0, 1, 9, 10, 40, len(GZIP) // 2, len(GZIP) - 8, len(GZIP) - 1])
def test_a_truncated_gzip_file(tmp_path, length):
    # Failed downloads are often empty, and `gzip -t` refuses an empty file too.
    assert 'gzip' in file_refusal(tmp_path, TextFiles, 'b.gz', GZIP[:length])


@pytest.mark.parametrize('length', [0, 1, 3, 5, 40, len(ZSTANDARD) // 2, len(ZSTANDARD) - 1])
def test_a_truncated_zstandard_file(tmp_path, length):
    assert 'zstd' in file_refusal(tmp_path, TextFiles, 'b.zst', ZSTANDARD[:length])


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
    assert {'gz': 'gzip', 'zst': 'zstd'}[ending] in message


def test_json_lines_in_a_truncated_file(tmp_path):
    lines = b''.join(
        b'{"text": "%d"}\n' % i for i in np.random.default_rng(0).integers(0, 9**9, 999)
    )
    content = gzip.compress(lines)
    assert 'gzip' in file_refusal(tmp_path, JsonLines, 'b.jsonl.gz', content[: len(content) // 2])


# Sizes.


@pytest.mark.parametrize('ending', ['', '.gz'])
@pytest.mark.parametrize('kind', [TextFiles, JsonLines])
def test_a_document_over_the_limit(tmp_path, kind, ending):
    content = b'{"text": "' + b'a' * 9_988 + b'"}'
    stored = gzip.compress(content) if ending else content
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / f'b{ending}').write_bytes(stored)
    where = {'pattern': 'b*', 'root': str(tmp_path / 'data'), 'holdout_percent': 0}
    message = refusal(tmp_path / 'cache', kind(max_document_bytes=9_999, **where))
    assert f'b{ending}' in message and '9,999 bytes' in message
    assert f'{kind.__name__}.max_document_bytes' in message
    [document] = kind(max_document_bytes=10_000, **where).listing().documents
    assert len(document.content) == (10_000 if kind is TextFiles else 9_988)


@pytest.mark.parametrize('limit', [0, -1, 1.5, None])
def test_an_invalid_limit(tmp_path, limit):
    message = refusal(tmp_path / 'cache', lambda: TextFiles(pattern='a', max_document_bytes=limit))
    assert 'TextFiles.max_document_bytes' in message and repr(limit) in message


# Record files and sequences.

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
    ('column', 'expected'),
    [
        (['a', None], 'row 1.*null'),
        ([7], 'row 0.*7'),
        ([{'text': 'a'}], 'row 0'),
        ([['a']], 'row 0'),
    ],
)
def test_a_parquet_row_that_is_not_text(tmp_path, column, expected):
    message = file_refusal(tmp_path, ParquetFiles, 'b.parquet', parquet_bytes(column))
    assert re.search(expected, message), message


def test_a_missing_parquet_column(tmp_path):
    message = file_refusal(tmp_path, ParquetFiles, 'b.parquet', parquet_bytes(['a'], 'texts'))
    assert re.search("no 'text', only 'texts'.*Did you mean 'texts'", message)


def test_a_parquet_string_need_not_be_utf8(tmp_path):
    # Parquet does not check strings, so files may contain such rows.
    offsets, content = np.array([0, 4, 6], np.int32), b'good\xff\xfe'
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(content)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    (tmp_path / 'b.parquet').write_bytes(parquet_bytes(column))
    source = ParquetFiles(pattern='b.parquet', root=str(tmp_path), holdout_percent=0)
    listed = list(source.listing().documents)
    assert [document.content for document in listed] == [b'good', b'\xff\xfe']
    message = refusal(tmp_path / 'cache', source, TextOnlyTokenizer())
    assert re.search('b.parquet:1 is not UTF-8', message), message


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


def test_an_array_record_that_is_not_a_json_object(tmp_path):
    write_array_record(tmp_path / 'b', [b'{"text": "a"}', b'{"text": 7}'])
    where = {'pattern': 'b', 'root': str(tmp_path)}
    message = refusal(tmp_path / 'cache', ArrayRecords(field='text', **where))
    assert re.search(r"/b.*record 1.*'text'.*7", message), message
    message = refusal(tmp_path / 'cache', ArrayRecords(field='body', **where))
    assert re.search(r"/b.*record 0 has no 'body'", message), message


# Records.


@pytest.mark.parametrize(
    ('record', 'expected'),
    [
        (None, 'null|None'),
        (7, '7'),
        (['a'], "'a'"),
        ({'txt': 'a'}, "no 'text', only 'txt'.*Did you mean 'txt'"),
        ({'text': None}, "'text'.*null"),
        ('\ud83d', 'surrogate'),
    ],
)
def test_a_record_that_is_not_text(tmp_path, record, expected):
    message = refusal(tmp_path / 'cache', Records(records=['a', record], cache_key='bad'))
    assert re.search(rf'record 1\b.*({expected})', message), message


@pytest.mark.parametrize(
    'records', [7, None, iter('ab'), {'a': 'b'}, 'one text'], ids=lambda x: type(x).__name__
)
def test_records_must_be_a_sequence_of_texts(tmp_path, records):
    # A mapping has no order of documents, and a text would become one document per letter.
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


@pytest.mark.skipif(
    not os.path.exists('/proc/self/mem'), reason='needs /proc/self/mem, which cannot be read'
)
@pytest.mark.parametrize('kind', [TextFiles, JsonLines, ParquetFiles, ArrayRecords])
def test_a_file_whose_reading_fails(tmp_path, kind):
    # The first page of a process's memory is never mapped, so reading it is an error.
    assert '/proc/self/mem' in refusal(tmp_path / 'cache', kind(pattern='/proc/self/mem'))


@pytest.mark.parametrize('kind', [TextFiles, JsonLines, ParquetFiles, ArrayRecords])
def test_a_file_that_is_deleted_before_it_is_read(tmp_path, kind):
    (tmp_path / 'gone').write_bytes(b'x')
    source = kind(pattern='gone', root=str(tmp_path))

    class Listed(kind):
        def listing(self):
            listing = source.listing()
            (tmp_path / 'gone').unlink()
            return listing

    message = refusal(tmp_path / 'cache', Listed(pattern='gone'))
    assert re.search(r'gone.*No such file', message), message
