"""Missing packages and invalid tokenizer files are refused in one line that names them."""

import importlib
import sys

import pytest
from refusals import refusal

from train.data import (
    ArrayRecords,
    HuggingFaceTokenizer,
    JsonLines,
    ParquetFiles,
    Records,
    SentencePieceTokenizer,
    TextFiles,
)
from train.errors import ConfigError

pytestmark = pytest.mark.core


# Packages that are not installed.


# Python 3.14 has the module itself, and would not ask for it.
ZSTD = 'compression' if sys.version_info >= (3, 14) else 'backports'


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
        (TextFiles, ZSTD, 'data', 'a.zst'),
        (JsonLines, ZSTD, 'data', 'a.jsonl.zst'),
        (ArrayRecords, 'array_record', 'train', 'a.array_record'),
    ],
)
def test_a_source_without_its_package_names_the_extra(
    tmp_path, monkeypatch, kind, package, extra, name
):
    (tmp_path / name).write_bytes(b'any content')
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
    ('kind', 'words'),
    [
        (SentencePieceTokenizer, 'not a SentencePiece model'),
        (HuggingFaceTokenizer, 'not a tokenizer.json'),
    ],
)
def test_an_invalid_tokenizer_file(tmp_path, kind, words, content):
    path = tmp_path / 'model'
    if content == 'folder':
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    expected = {None: 'No such file', 'folder': 'Is a directory'}.get(content, words)
    source = Records(records=['a'], cache_key='a')
    messages = [refusal(tmp_path / 'cache', source, kind(path=str(path)))]
    with pytest.raises(ConfigError) as caught:
        print(kind(path=str(path)).num_tokens)
    messages.append(str(caught.value))
    for message in messages:
        assert expected in message
        assert message.count(str(path)) == 1, 'the message names the path only once'
