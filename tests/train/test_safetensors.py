"""Safetensors files: read slice by slice, written array by array, and refused if malformed."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from train.checkpoints.arrays.stored import in_memory
from train.checkpoints.formats import safetensors_files
from train.checkpoints.formats.safetensors_files import open_safetensors
from train.checkpoints.formats.safetensors_writer import SafetensorsWriter, write_safetensors
from train.errors import ConfigError

pytestmark = pytest.mark.smoke

RANDOM = np.random.default_rng(0)
ARRAYS = {
    'matrix': RANDOM.normal(size=(7, 12)).astype(np.float32),
    'deep': RANDOM.normal(size=(3, 4, 5, 6)).astype(np.float16),
    'brain': RANDOM.normal(size=(5, 8)).astype(ml_dtypes.bfloat16),
    'count': np.array(3, np.int64),
    'flags': np.array([True, False, True]),
    'empty': np.zeros((0, 4), np.float32),
}
SLICES = [
    ...,
    slice(1, 3),
    (slice(0, 2), slice(1, 3)),
    (slice(None), slice(2, 5)),
    (slice(1, 2), slice(1, 3), slice(None), slice(2, 4)),
    (slice(None), slice(None), slice(None), slice(0, 1)),
]


def write_raw(file, header, data=b'', *, length=None):
    """Writes a file with any header, which is JSON or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, 'little') + text + data)


def entry(dtype='F32', shape=(2,), offsets=(0, 8)):
    return {'dtype': dtype, 'shape': shape, 'data_offsets': offsets}


def assert_equal(read, expected):
    assert read.dtype == expected.dtype
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize('block', [1, 50, 2**24])
def test_slices_of_files_of_the_library(tmp_path, monkeypatch, block):
    monkeypatch.setattr(safetensors_files, 'BLOCK_BYTES', block)
    save_file(ARRAYS, tmp_path / 'weights.safetensors')
    stored = open_safetensors(tmp_path)
    assert stored.keys() == ARRAYS.keys()
    for name, expected in ARRAYS.items():
        assert (stored[name].shape, stored[name].dtype) == (expected.shape, expected.dtype)
        for index in SLICES:
            if index is ... or expected.ndim >= len(index if isinstance(index, tuple) else (0,)):
                assert_equal(stored[name].read(index), expected[index])


@pytest.mark.parametrize(('size', 'files'), [(2**30, 1), (200, 3)])
def test_the_library_reads_what_is_written(tmp_path, size, files):
    stored = {name: in_memory(values) for name, values in ARRAYS.items()}
    write_safetensors(tmp_path, stored, max_file_bytes=size, metadata={'format': 'pt'})
    found = {}
    for file in tmp_path.glob('*.safetensors'):
        found |= load_file(file)
    assert len(list(tmp_path.iterdir())) == files + (files > 1)
    for name, expected in ARRAYS.items():
        assert_equal(found[name], expected)
        assert_equal(open_safetensors(tmp_path)[name].read(), expected)


def test_arrays_are_written_in_any_order(tmp_path):
    with SafetensorsWriter(tmp_path, ARRAYS, max_file_bytes=200) as writer:
        for name in reversed(ARRAYS):
            writer.write(name, ARRAYS[name])
    for name, stored in open_safetensors(tmp_path).items():
        assert_equal(stored.read(), ARRAYS[name])


def test_nothing_remains_of_an_incomplete_model(tmp_path):
    writer = SafetensorsWriter(tmp_path, ARRAYS, max_file_bytes=200)
    with pytest.raises(ValueError, match='5 arrays are not written'), writer:
        writer.write('count', ARRAYS['count'])
    assert list(tmp_path.iterdir()) == []


def test_existing_safetensors_are_not_overwritten(tmp_path):
    save_file({'matrix': ARRAYS['matrix']}, tmp_path / 'mine.safetensors')
    with pytest.raises(ConfigError, match='has safetensors already'):
        SafetensorsWriter(tmp_path, ARRAYS)


def test_stores_of_objects_are_not_written():
    pytest.importorskip('s3fs', reason='paths of S3 need s3fs')
    with pytest.raises(ConfigError, match='local folder'):
        SafetensorsWriter('s3://bucket/model', ARRAYS)


MALFORMED = {
    'shorter than a length': b'abc',
    'longer than the file': ({}, b'', 10**6),
    'longer than any': ({}, b'', 2**63 + 5),
    'not json': (b'{"a": ', b''),
    'not utf-8': (b'{"\xff\xfe": 1}', b''),
    'not an object': ([1, 2], b''),
    'deep json': (b'{"a":' + b'[' * 100_000, b''),
    'a number of many digits': (b'{"a": ' + b'9' * 100_000 + b'}', b''),
    'an entry that is a number': ({'a': 5}, b''),
    'the same name twice': (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    'an unknown dtype': ({'a': entry('F6_E2M3')}, bytes(8)),
    'a negative dimension': ({'a': entry(shape=[-1])}, bytes(8)),
    'a boolean dimension': ({'a': entry(shape=[True], offsets=[0, 4])}, bytes(4)),
    'a shape larger than memory': ({'a': entry(shape=[2**40, 2**40])}, bytes(8)),
    'an empty array of absurd shape': ({'a': entry(shape=[0, 2**62], offsets=[0, 0])}, b''),
    'a thousand dimensions': ({'a': entry(shape=[1] * 1000, offsets=[0, 4])}, bytes(4)),
    'a shape that wraps around': ({'a': entry(shape=[2**32, 2**32], offsets=[0, 0])}, b''),
    'offsets in reverse': ({'a': entry(offsets=[8, 0])}, bytes(8)),
    'offsets beyond the file': ({'a': entry(offsets=[0, 8])}, bytes(4)),
    'offsets that are far away': ({'a': entry(offsets=[2**40, 2**40 + 8])}, bytes(8)),
    'arrays that overlap': ({'a': entry(), 'b': entry(offsets=[4, 12])}, bytes(12)),
    'a gap': ({'a': entry(), 'b': entry(offsets=[12, 20])}, bytes(20)),
    'bytes after the arrays': ({'a': entry()}, bytes(9)),
}


@pytest.mark.parametrize('name', MALFORMED)
def test_malformed_files_are_refused_in_one_line(tmp_path, name):
    content, file = MALFORMED[name], tmp_path / 'model.safetensors'
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        write_raw(file, content[0], content[1], length=content[2] if len(content) > 2 else None)
    with pytest.raises(ConfigError, match='is not a safetensors file, or it is damaged') as error:
        open_safetensors(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400 + len(str(file))


def test_hostile_names_are_quoted(tmp_path):
    write_raw(tmp_path / 'model.safetensors', {'a\n\x1b[31m' * 1000: entry('F5')}, bytes(8))
    with pytest.raises(ConfigError, match=r"'a\\n\\x1b\[31m") as error:
        open_safetensors(tmp_path)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


@pytest.mark.long
def test_the_largest_headers_need_little_memory(tmp_path):
    text = b'{"a":[' + b'[],' * (8 * 2**20 // 3 - 10) + b'[]]}'
    write_raw(tmp_path / 'model.safetensors', text)
    program = (
        'import re, sys\n'
        'from train.checkpoints.formats.safetensors_files import open_safetensors\n'
        'from train.errors import ConfigError\n'
        'status = open("/proc/self/status")\n'
        'try: open_safetensors(sys.argv[1])\n'
        'except ConfigError: print(re.search("VmHWM: *(.*) kB", status.read())[1])\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < 512 * 1024


def split(tmp_path):
    """Writes the arrays into three files with an index, and returns the index."""
    stored = {name: in_memory(values) for name, values in ARRAYS.items()}
    write_safetensors(tmp_path, stored, max_file_bytes=200)
    return json.loads((tmp_path / 'model.safetensors.index.json').read_text())


def change(tmp_path, weight_map):
    file = tmp_path / 'model.safetensors.index.json'
    file.write_text(json.dumps({'weight_map': weight_map}))


def test_a_missing_shard_is_named(tmp_path):
    split(tmp_path)
    (tmp_path / 'model-00002-of-00003.safetensors').unlink()
    with pytest.raises(ConfigError, match=r'no file model-00002-of-00003\.safetensors.* 1 arrays'):
        open_safetensors(tmp_path)


def test_an_array_that_only_the_index_has_is_named(tmp_path):
    weight_map = split(tmp_path)['weight_map']
    change(tmp_path, {**weight_map, 'more': weight_map['matrix']})
    with pytest.raises(ConfigError, match="has no array 'more'"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize('file', ['../secret.safetensors', '/etc/passwd', 'a/b.safetensors', 'x'])
def test_an_index_stays_in_its_folder(tmp_path, file):
    change(tmp_path, {'matrix': file})
    with pytest.raises(ConfigError, match='is not the name of a safetensors file'):
        open_safetensors(tmp_path)


@pytest.mark.parametrize('content', ['{', '[]', '{}', '{"weight_map": [1]}', '[' * 100_000])
def test_a_malformed_index_is_refused(tmp_path, content):
    (tmp_path / 'model.safetensors.index.json').write_text(content)
    with pytest.raises(ConfigError, match='is not an index of safetensors'):
        open_safetensors(tmp_path)


def test_an_array_in_two_files_is_refused(tmp_path):
    weight_map = split(tmp_path)['weight_map']
    save_file({'matrix': ARRAYS['matrix']}, tmp_path / 'more.safetensors')
    change(tmp_path, {**weight_map, 'flags': 'more.safetensors'})
    with pytest.raises(ConfigError, match="'matrix' is in another file as well"):
        open_safetensors(tmp_path)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n(S"false"\ntR.')
    for path in (tmp_path, tmp_path / 'pytorch_model.bin'):
        with pytest.raises(ConfigError, match=r'is a pickle.*safe_serialization=True'):
            open_safetensors(path)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ConfigError, match='has no safetensors files'):
        open_safetensors(tmp_path)


def test_several_files_without_an_index_are_ambiguous(tmp_path):
    for name in ('a', 'b'):
        save_file({name: ARRAYS['matrix']}, tmp_path / f'{name}.safetensors')
    with pytest.raises(ConfigError, match=r'has 2 safetensors files.*no model\.safetensors\.index'):
        open_safetensors(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    save_file(ARRAYS, tmp_path / 'model.safetensors')
    stored = open_safetensors(tmp_path)
    (tmp_path / 'model.safetensors').write_bytes(b'')
    with pytest.raises(OSError, match='ends in the middle of an array'):
        stored['matrix'].read()
