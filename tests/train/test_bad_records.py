"""Bad record files and sequences are refused in one line that names the place."""

import os
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from refusals import TextOnlyTokenizer, file_refusal, refusal, write_array_record

from train.data import ArrayRecords, JsonLines, ParquetFiles, Records, TextFiles

pytestmark = pytest.mark.core

# Random, so that damage cannot go unnoticed.
TEXT = np.random.default_rng(0).integers(32, 127, 5000, np.uint8).tobytes()


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
