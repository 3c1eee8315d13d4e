"""Text files as one stream of byte tokens, whole files held out for evaluation."""

from __future__ import annotations

import dataclasses
import glob
import os
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import gin
import numpy as np

# A byte is its own token; one more token stands before every file.
SEPARATOR = 256
NUM_TOKENS = 257


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A stream of tokens.

    Attributes:
      name: what to call it.
      tokens: uint16 [tokens], each file behind a SEPARATOR, and one SEPARATOR at the end.
      num_files: files in it.
    """

    name: str
    tokens: np.ndarray
    num_files: int

    @property
    def num_bytes(self) -> int:
        return int(np.sum(self.tokens < SEPARATOR))

    def head(self, num_tokens: int) -> Corpus:
        """The first so many tokens; the last of their files may be cut short."""
        tokens = self.tokens[:num_tokens]
        return Corpus(self.name, tokens, int(np.sum(tokens[:-1] == SEPARATOR)))

    def text(self) -> bytes:
        """The bytes, without separators."""
        return self.tokens[self.tokens < SEPARATOR].astype(np.uint8).tobytes()


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
    """The files of a corpus.

    Attributes:
      pattern: a glob, or several; `**` crosses folders.
      exclude: parts of paths that leave a file out, such as '/test/'.
      holdout_percent: about this share of the files is held out for evaluation, each file whole.
        Which ones depends on their paths below `root` alone, so adding files moves none.
      root: the folder that patterns and those paths start at; by default the current one.
    """

    pattern: str | Sequence[str]
    exclude: str | Sequence[str] = ()
    holdout_percent: float = 2.0
    root: str = ''

    def load(self) -> tuple[Corpus, Corpus]:
        """Reads the files: (training, held out).

        Raises:
          ValueError: no file matches, or one of the two parts has no bytes.
        """
        exclude = [self.exclude] if isinstance(self.exclude, str) else list(self.exclude)
        patterns = [self.pattern] if isinstance(self.pattern, str) else list(self.pattern)
        root = Path(os.path.expanduser(self.root or '.'))
        matches = (f for p in patterns for f in glob.glob(p, root_dir=root, recursive=True))
        found = {Path(os.path.relpath(root / match, root)).as_posix() for match in matches}
        names = sorted(
            name
            for name in found
            if (root / name).is_file() and not any(e in f'/{name}' for e in exclude)
        )
        where = f'{patterns} in {root.resolve()}' + (f' without {exclude}' if exclude else '')
        if not names:
            raise ValueError(f'empty corpus: no file matches {where}')
        held_out = [n for n in names if self._held_out(n)]
        training = [n for n in names if not self._held_out(n)]
        return (
            self._read('training', root, training, where),
            self._read('held out', root, held_out, where),
        )

    def _held_out(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % 10_000 < self.holdout_percent * 100

    def _read(self, part: str, root: Path, names: list[str], where: str) -> Corpus:
        contents = [(root / name).read_bytes() for name in names]
        if not any(contents):
            raise ValueError(
                f'empty corpus: the {part} part has {len(names)} of the files that match {where} '
                f'and no bytes; holdout_percent is {self.holdout_percent}'
            )
        separator = np.array([SEPARATOR], np.uint16)
        pieces = [separator]
        for content in contents:
            pieces += [np.frombuffer(content, np.uint8).astype(np.uint16), separator]
        return Corpus(part, np.concatenate(pieces), len(names))


@gin.configurable
def python_library() -> TextFiles:
    """The sources of the running Python's standard library: several MB of text on any machine."""
    return TextFiles(
        pattern='**/*.py',
        exclude=('/site-packages/', '/dist-packages/', '/test/', '/tests/', '/idle_test/'),
        holdout_percent=1.0,
        root=sysconfig.get_path('stdlib'),
    )


def order0_bits_per_byte(text: bytes) -> float:
    """Entropy of the byte frequencies of a text, in bits: what no context at all can reach."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    p = counts[counts > 0] / len(text)
    return float(-np.sum(p * np.log2(p)))


def zlib_bits_per_byte(text: bytes) -> float:
    """Bits a byte of `zlib.compress(text, 9)`."""
    return 8 * len(zlib.compress(text, 9)) / len(text)
