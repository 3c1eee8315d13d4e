"""Files that would take too much memory or disk are refused before they do."""

import bz2
import gzip
import itertools
import lzma
import random
import struct

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from refusals import file_refusal, refusal
from tensorboardX.record_writer import masked_crc32c

from train.data import ArrayRecords, JsonLines, ParquetFiles, Records, TextFiles, TfRecords
from train.data.text import record_files
from train.data.text.files import File, decompressed_limit
from train.data.text.tf_records import parse_example

pytestmark = pytest.mark.core

LINES = b'{"text": "0123456789"}\n\n' * 100
COMPRESS = {
    'gz': gzip.compress,
    'bz2': bz2.compress,
    'xz': lzma.compress,
    'zst': zstandard.ZstdCompressor().compress,
}


def contents(source):
    return [document.content for document in source.listing().documents]


# Decompressed files.


@pytest.mark.parametrize('ending', COMPRESS)
def test_the_size_of_a_decompressed_file(tmp_path, ending):
    size, stored = len(LINES), COMPRESS[ending](LINES)
    message = file_refusal(
        tmp_path, JsonLines, f'b.{ending}', stored, max_decompressed_bytes=size - 1
    )
    assert f'more than {size - 1:,} bytes' in message and 'max_decompressed_bytes' in message
    source = JsonLines(pattern='*', root=str(tmp_path / 'data'), max_decompressed_bytes=size)
    assert contents(source) == [b'0123456789'] * 100


def test_by_default_a_decompressed_file_may_have_1_gib_or_100_times_its_size():
    def limit(size, max_bytes=None):
        return decompressed_limit(File('a', 'a', size, 0), max_bytes)

    assert limit(1000) == limit(10 << 20) == 1 << 30
    assert limit(1 << 30) == 100 << 30
    assert limit(1 << 30, 5000) == 5000


def test_files_that_are_not_compressed_have_any_size(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(LINES)
    source = JsonLines(pattern='*', root=str(tmp_path), max_decompressed_bytes=len(LINES))
    assert len(contents(source)) == 100


def test_records_that_are_copies_count_each_time(tmp_path):
    # Their text is stored once.
    text = '0123456789' * 100
    pyarrow.parquet.write_table(pyarrow.table({'text': [text] * 2000}), tmp_path / 'b.parquet')
    assert (tmp_path / 'b.parquet').stat().st_size < 10_000
    settings = {'pattern': '*.parquet', 'root': str(tmp_path)}
    message = refusal(tmp_path / 'c', ParquetFiles(max_decompressed_bytes=1_999_999, **settings))
    assert 'more than 1,999,999 bytes' in message
    assert len(contents(ParquetFiles(max_decompressed_bytes=2_000_000, **settings))) == 2000


# The memory of decompressors.


def test_a_large_window_needs_the_setting(tmp_path):
    how = zstandard.ZstdCompressionParameters(window_log=24, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=how).compressobj()
    content = stream.compress(b'text') + stream.flush()
    message = file_refusal(tmp_path, TextFiles, 'b.zst', content, max_window_bytes=1 << 23)
    assert '8,388,608 bytes of memory' in message and 'max_window_bytes' in message
    settings = {'pattern': '*', 'root': str(tmp_path / 'data'), 'max_window_bytes': 1 << 24}
    assert contents(TextFiles(**settings)) == [b'text']


def test_the_window_of_an_xz_file_is_its_dictionary(tmp_path):
    content = lzma.compress(b'text', preset=6)  # 8 MiB, of the manual of xz
    message = file_refusal(tmp_path, TextFiles, 'b.xz', content, max_window_bytes=1 << 22)
    assert '4,194,304 bytes of memory' in message and 'max_window_bytes' in message
    settings = {'pattern': '*', 'root': str(tmp_path / 'data'), 'max_window_bytes': 1 << 23}
    assert contents(TextFiles(**settings)) == [b'text']


def test_xz_files_of_several_streams(tmp_path):
    # `cat a.xz b.xz` and `pixz` make them, and zeros may follow each stream.
    texts = [random.Random(i).randbytes(size) for i, size in enumerate([100_000, 0, 300_000])]
    content = b''.join(lzma.compress(text) + bytes(4 * i) for i, text in enumerate(texts))
    (tmp_path / 'a.xz').write_bytes(content)
    assert contents(TextFiles(pattern='*', root=str(tmp_path))) == [b''.join(texts)]


@pytest.mark.parametrize('damage', ['cut', 'middle', 'behind'])
def test_a_damaged_xz_file(tmp_path, damage):
    content = lzma.compress(random.Random(0).randbytes(100_000))
    damaged = {
        'cut': content[:-20],
        'middle': content[:500] + bytes(100) + content[600:],
        'behind': content + b'something else',
    }[damage]
    assert 'not a complete xz file' in file_refusal(tmp_path, TextFiles, 'b.xz', damaged)


# Parquet.


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(record_files, 'GROUP_BYTES', 10_000)


def test_a_row_group_of_parquet(tmp_path, small_groups):
    table = pyarrow.table({'id': [1] * 50, 'text': ['a' * 20_000] * 50})
    pyarrow.parquet.write_table(
        table, tmp_path / 'b', use_dictionary=False, compression='zstd', row_group_size=30
    )
    settings = {'pattern': 'b', 'root': str(tmp_path)}
    message = refusal(tmp_path / 'c', ParquetFiles(**settings))
    assert 'row group 0' in message and 'ParquetFiles.max_decompressed_bytes' in message
    assert len(contents(ParquetFiles(max_decompressed_bytes=2_000_000, **settings))) == 50


def test_a_dictionary_of_parquet_may_be_copied_into_each_row(tmp_path, small_groups, monkeypatch):
    texts = ['a' * 4000, 'b' * 3000] * 50
    pyarrow.parquet.write_table(pyarrow.table({'text': texts}), tmp_path / 'b', compression='NONE')
    source = ParquetFiles(pattern='b', root=str(tmp_path))
    sizes = []
    read = pyarrow.parquet.ParquetFile.iter_batches

    def iter_batches(self, batch_size, **settings):
        sizes.append(batch_size)
        return read(self, batch_size, **settings)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, 'iter_batches', iter_batches)
    assert contents(source) == [text.encode() for text in texts]
    assert sizes == [1]  # The dictionary has 7,008 bytes, with the lengths of its entries.
    monkeypatch.setattr(record_files, 'GROUP_BYTES', 7_008 * 50)
    assert len(contents(source)) == 100 and sizes == [1, 50]
    monkeypatch.setattr(record_files, 'GROUP_BYTES', 7_007)
    assert 'a dictionary of 7,008 bytes' in refusal(tmp_path / 'c', source)


# ArrayRecord.


def write_records(path, records, options):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


@pytest.mark.parametrize('options', ['group_size:1', 'group_size:7,zstd:3', 'group_size:100'])
def test_array_records_are_read_in_groups_of_a_bounded_size(tmp_path, small_groups, options):
    # Larger and smaller than a block of the file, which has 65,536 bytes.
    made = random.Random(0)
    records = [made.randbytes(made.choice([0, 1, 40, 900, 70_000])) for _ in range(300)]
    write_records(tmp_path / 'b', records, options)
    source = ArrayRecords(pattern='b', root=str(tmp_path), max_document_bytes=8_000_000)
    assert contents(source) == records
    path = tmp_path / 'b'
    file = File('b', path, path.stat().st_size, 0)
    ranges = list(record_files.record_ranges(file, 8_000_000))
    assert len(ranges) > 2 and ranges[0][0] == 0
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_a_group_of_array_records(tmp_path, small_groups):
    write_records(tmp_path / 'b', [b'a' * 1000] * 11, 'group_size:11')
    settings = {'pattern': 'b', 'root': str(tmp_path)}
    message = refusal(tmp_path / 'c', ArrayRecords(max_document_bytes=1000, **settings))
    assert '11,000 bytes' in message and 'group_size' in message and 'max_document_bytes' in message
    assert len(contents(ArrayRecords(max_document_bytes=11_000, **settings))) == 11


# TFRecord.


@pytest.mark.parametrize('length', [1_001, 2**31, 2**62, 2**64 - 1])
def test_the_length_of_a_tf_record(tmp_path, length):
    header = struct.pack('<Q', length)
    content = header + struct.pack('<I', masked_crc32c(header)) + bytes(100)
    message = file_refusal(tmp_path, TfRecords, 'b', content, max_document_bytes=1_000)
    assert f'record 0 has {length:,} bytes' in message
    assert 'TfRecords.max_document_bytes' in message


def test_a_number_of_a_tf_record_has_64_bits():
    # Longer ones would take time in proportion to the square of their length.
    with pytest.raises(ValueError, match='64 bits'):
        list(parse_example(b'\x0a' + b'\xff' * 100))


# Settings.


@pytest.mark.parametrize('name', ['max_decompressed_bytes', 'max_window_bytes'])
@pytest.mark.parametrize('limit', [0, -1, 1.5, '1 GiB'])
def test_an_invalid_limit_of_files(tmp_path, name, limit):
    message = refusal(tmp_path / 'cache', lambda: TextFiles(pattern='a', **{name: limit}))
    assert f'TextFiles.{name}' in message and repr(limit) in message


def test_a_limit_does_not_change_the_index(tmp_path):
    (tmp_path / 'a').write_bytes(b'a')
    settings = {'pattern': 'a', 'root': str(tmp_path)}
    limits = dict.fromkeys(('max_decompressed_bytes', 'max_window_bytes'), 1000)
    limited = TextFiles(max_document_bytes=1000, **limits, **settings)
    assert limited.listing().signature == TextFiles(**settings).listing().signature


def test_records_in_memory_have_any_size():
    [document] = Records(records=['a' * (9 << 20)]).listing().documents
    assert len(document.content) == 9 << 20
