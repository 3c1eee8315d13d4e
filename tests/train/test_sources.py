"""Sources: the same documents from text, JSON lines, Parquet, ArrayRecord and any sequence."""

import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from refusals import write_array_record
from written_files import documents, documents_of_both_parts, index_of, write

from train.data import (
    ArrayRecords,
    Document,
    JsonLines,
    ParquetFiles,
    Records,
    Source,
    TextFiles,
    python_library,
)
from train.data.text.sources import Listing

pytestmark = pytest.mark.core

# An empty document, outer spaces, control characters, all line ends, characters beyond Latin 1.
DOCUMENTS = ['one', '', ' two\n', 'a\tb\x00c', 'x\r\ny\rz\u2028w', 'naïve Ω \U0001f600', 'one']


def json_lines(documents, field='text', **how):
    return ''.join(json.dumps({'id': 1, field: d}, **how) + '\n' for d in documents).encode()


def write_parquet(path, column, name='text', **how):
    table = pyarrow.table({'id': list(range(len(column))), name: column})
    pyarrow.parquet.write_table(table, path, **how)


def names(source):
    return [document.name for document in source.listing().documents]


# Files.


def test_files_come_once_each_sorted_by_name(tmp_path):
    contents = {'b.txt': b'b', 'a/z.txt': b'az', 'a.txt': b'a', 'c/d/e.txt': b'cde', 'n.md': b'n'}
    write(tmp_path, contents | {'skip/x.txt': b'no', 'a/test/d/y.txt': b'no', '.h/x.txt': b'no'})
    (tmp_path / 'linked').symlink_to(tmp_path / 'a/test')  # glob follows it
    contents['linked/d/y.txt'] = b'no'
    source = TextFiles(
        pattern=['**/*.txt', '*.md', 'a/*', 'c/../b.txt', f'{tmp_path}/c/**/*.txt'],
        exclude=['/skip/', '/test/'],
        root=str(tmp_path),
        holdout_percent=0,
    )
    assert names(source) == sorted(contents)
    assert documents_of_both_parts(source, tmp_path / 'cache') == (
        [contents[n] for n in sorted(contents)],
        [],
    )


def test_pattern_and_exclude_may_be_single_strings(tmp_path):
    write(tmp_path, {'ab.txt': b'ab', 'b.txt': b'b'})
    assert names(TextFiles(pattern='*.txt', exclude='/ab', root=str(tmp_path))) == ['b.txt']


def test_pattern_and_root_may_be_paths(tmp_path):
    write(tmp_path, {'a.txt': b'a'})
    assert names(TextFiles(pattern='*.txt', root=tmp_path)) == ['a.txt']
    assert names(TextFiles(pattern=Path('a.txt'), root=tmp_path)) == ['a.txt']


def test_a_tilde_stands_for_the_home_directory(tmp_path, monkeypatch):
    write(tmp_path, {'home/text/a.txt': b'a'})
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    assert names(TextFiles(pattern='*.txt', root='~/text')) == ['a.txt']
    source = TextFiles(pattern='~/text/*.txt', holdout_percent=0)
    assert documents_of_both_parts(source, tmp_path / 'cache')[0] == [b'a']


def test_patterns_start_at_the_current_directory(tmp_path, monkeypatch):
    write(tmp_path, {'text/a.txt': b'a'})
    monkeypatch.chdir(tmp_path)
    assert names(TextFiles(pattern='text/*')) == ['text/a.txt']


def test_a_matching_directory_is_not_a_document(tmp_path):
    write(tmp_path, {'a.txt': b'a', 'folder.txt/b': b'b'})
    assert names(TextFiles(pattern='*.txt', root=str(tmp_path))) == ['a.txt']


def test_a_file_name_need_not_be_utf8(tmp_path):
    # `os.listdir` returns such names for bytes that are not UTF-8, which old archives contain.
    try:
        write(tmp_path, {'caf\udce9.txt': b'coffee'})
    except OSError:
        pytest.skip('this file system takes UTF-8 names only')
    source = TextFiles(pattern='*.txt', root=str(tmp_path), holdout_percent=0)
    assert documents_of_both_parts(source, tmp_path / 'cache')[0] == [b'coffee']


@pytest.mark.parametrize('frames', [1, 3])
@pytest.mark.parametrize(
    ('ending', 'compress'),
    [
        ('gz', gzip.compress),
        ('zst', zstandard.ZstdCompressor().compress),
        ('bz2', bz2.compress),
        ('xz', lzma.compress),
    ],
)
def test_compressed_files_are_decompressed(tmp_path, ending, compress, frames):
    text = np.random.default_rng(0).integers(0, 256, 400_000, np.uint8).tobytes() + b'end'
    cuts = [len(text) * i // frames for i in range(frames + 1)]
    content = b''.join(compress(text[a:b]) for a, b in itertools.pairwise(cuts))
    write(tmp_path, {f'a.txt.{ending}': content, f'b.txt.{ending}': compress(b'')})
    source = TextFiles(pattern='*', root=str(tmp_path), holdout_percent=0)
    assert documents_of_both_parts(source, tmp_path / 'cache')[0] == [text, b'']


def test_zstandard_files_with_a_large_window_are_read(tmp_path):
    # Published dumps of the web are compressed with `zstd --long=28` and above.
    how = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=how).compressobj()
    (tmp_path / 'a.zst').write_bytes(stream.compress(b'text') + stream.flush())
    source = TextFiles(pattern='*', root=str(tmp_path), holdout_percent=0)
    assert documents_of_both_parts(source, tmp_path / 'cache')[0] == [b'text']


def test_decompression_needs_little_memory(tmp_path):
    line = json.dumps({'text': 'the same again ' * 700}).encode() + b'\n'
    compressed = zstandard.ZstdCompressor().compress(line * 6000)
    (tmp_path / 'a.jsonl.zst').write_bytes(compressed)
    tracemalloc.start()
    source = JsonLines(pattern='*', root=str(tmp_path))
    count = sum(1 for document in source.listing().documents)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 6000
    assert len(line) * count > 60_000_000
    assert peak < 20_000_000


def test_a_small_file_with_much_text_needs_little_more_memory_than_its_text(tmp_path):
    size = 16 << 20
    (tmp_path / 'a.gz').write_bytes(gzip.compress(b'a' * size))
    source = TextFiles(pattern='*.gz', root=str(tmp_path), holdout_percent=0)
    tracemalloc.start()
    index = index_of(source, tmp_path / 'cache')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.training.num_bytes == size
    assert peak < 1.5 * size


def test_the_python_library_has_training_and_held_out_text(tmp_path):
    index = index_of(python_library(), tmp_path)
    assert index.training.num_bytes > 1_000_000
    assert index.held_out.num_bytes > 10_000


# The same documents through every kind of source.


def sources_of_documents(root):
    """Sources of every kind that contain DOCUMENTS, by name."""
    raw = [d.encode() for d in DOCUMENTS]
    lines = json_lines(DOCUMENTS)
    third = len(DOCUMENTS) // 3
    compress = zstandard.ZstdCompressor().compress
    frames = b''.join(compress(lines[i : i + 50]) for i in range(0, len(lines), 50))
    write(root, {f'text/{i}.txt': content for i, content in enumerate(raw)})
    write(
        root,
        {
            'plain.jsonl': lines,
            'utf8.jsonl': json_lines(DOCUMENTS, ensure_ascii=False),
            'open.jsonl': lines.rstrip(b'\n'),
            'crlf.jsonl': lines.replace(b'\n', b'\r\n'),
            'blank.jsonl': b'\n' + lines.replace(b'\n', b'\n \t\n\n'),
            'gzip.jsonl.gz': gzip.compress(lines[:100]) + gzip.compress(lines[100:]),
            'zstandard.jsonl.zst': frames,
            'split-1.json': json_lines(DOCUMENTS[:third], 'body'),
            'split-2.json': json_lines(DOCUMENTS[third:], 'body'),
        },
    )
    columns = {
        'string': pyarrow.array(DOCUMENTS),
        'large_string': pyarrow.array(DOCUMENTS, pyarrow.large_string()),
        'binary': pyarrow.array(raw, pyarrow.binary()),
        'large_binary': pyarrow.array(raw, pyarrow.large_binary()),
        'dictionary': pyarrow.array(DOCUMENTS).dictionary_encode(),
    }
    for name, column in columns.items():
        write_parquet(root / f'{name}.parquet', column, row_group_size=3)
    write_parquet(root / 'column.pq', columns['string'], name='body', compression='zstd')
    write_array_record(root / 'text.array_record', raw)
    write_array_record(root / 'json.array_record', lines.splitlines())

    where = {'root': str(root), 'holdout_percent': 0}
    sources = {p.name: JsonLines(pattern=p.name, **where) for p in root.glob('*.jsonl*')}
    sources |= {p.name: ParquetFiles(pattern=p.name, **where) for p in root.glob('*.parquet')}
    lists = {
        'strings': DOCUMENTS,
        'bytes': tuple(raw),
        'mappings': [{'id': i, 'text': d} for i, d in enumerate(DOCUMENTS)],
        'mixed': [raw[0], {'text': raw[1]}, *DOCUMENTS[2:]],
        'own object': Sequence(DOCUMENTS),
        # NumPy's fixed-width strings drop only trailing zeros.
        'numpy': np.array(DOCUMENTS),
    }
    sources |= {n: Records(records=records, holdout_percent=0) for n, records in lists.items()}
    return sources | {
        'text': TextFiles(pattern='text/*', **where),
        'field': JsonLines(pattern='split-*.json', field='body', **where),
        'column': ParquetFiles(pattern='column.pq', column='body', **where),
        'records of text': ArrayRecords(pattern='text.array_record', **where),
        'records of JSON': ArrayRecords(pattern='json.array_record', field='text', **where),
        'own source': OwnSource(holdout_percent=0),
    }


class Sequence:
    """An object with only the methods that `Records` needs."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, i):
        if not isinstance(i, int):
            raise TypeError(type(i))
        return self._items[i]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSource(Source):
    """A source as a user would write it."""

    def listing(self):
        found = (Document(f'd{i}', d.encode(), i + 1) for i, d in enumerate(DOCUMENTS))
        return Listing({'source': 'own', 'version': 1}, len(DOCUMENTS), found)


def test_every_kind_of_source_gives_the_same_tokens_and_hash(tmp_path):
    expected = [d.encode() for d in DOCUMENTS]
    hashes = {}
    for name, source in sources_of_documents(tmp_path / 'data').items():
        index = index_of(source, tmp_path / 'cache')
        assert documents(index.training) == expected, name
        assert index.training.num_bytes == sum(map(len, expected)), name
        assert documents(index.held_out) == [], name
        hashes[name] = index.content_hash
    assert len(hashes) > 20
    assert len(set(hashes.values())) == 1, hashes


def test_a_custom_source_may_have_settings_of_any_type(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Tagged(JsonLines):
        languages: tuple = ('en', 'de')
        words: Path = Path('words')

        def contents(self, file):
            for number, content, read in super().contents(file):
                if any(content.startswith(language.encode()) for language in self.languages):
                    yield number, content, read

    write(tmp_path, {'a.jsonl': json_lines(['en one', 'fr deux', 'de drei'])})
    where = {'pattern': '*.jsonl', 'root': str(tmp_path), 'holdout_percent': 0}
    assert documents_of_both_parts(Tagged(**where), tmp_path / 'cache')[0] == [
        b'en one',
        b'de drei',
    ]
    other = Tagged(languages=('fr',), **where)
    assert documents_of_both_parts(other, tmp_path / 'cache')[0] == [b'fr deux']


def test_the_hash_depends_on_documents_boundaries_and_parts(tmp_path):
    texts = [['ab', 'c'], ['a', 'bc'], ['c', 'ab'], ['ab', 'c', ''], ['ab', 'd']]
    sources = [Records(records=t, holdout_percent=p) for t in texts for p in (0, 100)]
    hashes = {index_of(source, tmp_path).content_hash for source in sources}
    assert len(hashes) == len(sources)


def test_many_records_keep_their_order(tmp_path):
    # More than one batch of 1024 rows, and row groups that do not divide it.
    texts = [f'row {i}' for i in range(2500)]
    write_parquet(tmp_path / 'a.parquet', pyarrow.array(texts), row_group_size=700)
    write_array_record(tmp_path / 'a.array_record', [t.encode() for t in texts])
    for source in (
        ParquetFiles(pattern='*.parquet', root=str(tmp_path), holdout_percent=0),
        ArrayRecords(pattern='*.array_record', root=str(tmp_path), holdout_percent=0),
    ):
        assert documents_of_both_parts(source, tmp_path / 'cache')[0] == [t.encode() for t in texts]
