"""Sources and tokenizers that count how they are used, for tests of the token index."""

import dataclasses

import numpy as np
import pytest

from train.data import ByteTokenizer, Document, Source, Tokenizer, open_index
from train.data.text.sources import Listing
from train.errors import ConfigError

CONTENTS = [b'one', b'', b'two three', b'\x00\xff', b'four']


def quiet(*progress):
    """A `Progress` callback that prints nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed(Source):
    """A source that counts how often its documents are read. An exception as content is raised."""

    contents: list
    signature: object = 'listed'
    holdout_percent: float = 0
    reads: list = dataclasses.field(default_factory=list)

    def listing(self):
        return Listing(self.signature, len(self.contents), self._documents())

    def _documents(self):
        self.reads.append(1)
        for i, content in enumerate(self.contents):
            if isinstance(content, BaseException):
                raise content
            yield Document(f'{i}', content, i + 1)


@dataclasses.dataclass
class Counted(Tokenizer):
    """A tokenizer with two tokens per byte and a vocabulary of any size."""

    num_tokens: int = 1000
    identity: str = 'counted'
    offset: int = 0
    groups: list = dataclasses.field(default_factory=list)

    @property
    def separator(self):
        return self.num_tokens - 1

    def encode(self, names, contents):
        self.groups.append([len(content) for content in contents])
        return [
            np.repeat(np.frombuffer(c, np.uint8), 2).astype(int) + self.offset for c in contents
        ]

    def decode(self, tokens):
        tokens = np.asarray(tokens)
        return tokens[tokens < 256].astype(np.uint8).tobytes()[::2]


def listed(contents=CONTENTS, signature=None, **settings):
    return Listed(contents=list(contents), signature=signature or {'v': 1}, **settings)


def refusal(cache, source, tokenizer=None):
    """Returns the error message of opening the index of a source."""
    with pytest.raises(ConfigError) as caught:
        open_index(source, tokenizer or ByteTokenizer(), str(cache), quiet)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def files_in(cache):
    """Returns the names of the files and folders in a cache, without lock files."""
    return [path.name for path in cache.iterdir() if path.suffix != '.lock']
