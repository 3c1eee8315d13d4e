"""Limits how much is read from gin files, because strangers may have written them.

Everything here is checked before gin sees a statement, without importing jax.
"""

from __future__ import annotations

import collections
import graphlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from partitioning.untrusted_text import read_regular_file
from train.errors import ConfigError
from train.paths import is_remote

MOST_BYTES = 2**20  # of a file
MOST_FILES = 200  # with the files that they include, counted each time
MOST_STATEMENTS = 5_000
MOST_VALUES = 1_000_000  # after all references are replaced by what they stand for
_LONGEST_OF_FILE = 50_000  # characters of a line
LARGEST_INTEGER = 2**64 - 1
_LONGEST_LINE = 200
# Options of XLA that name files and folders: it writes to them, and reads or runs what is there.
# https://github.com/openxla/xla/blob/main/xla/xla.proto, DebugOptions
_OPTION_WITH_FILES = re.compile(
    r'-*xla_(\w+_)?((dump|dir|directory|files?|path|extra)(_\w*)?|from|to)'
)


class BeyondLimitsError(ConfigError):
    """A value that no setting has."""


def shortened(text: str, longest: int = _LONGEST_LINE) -> str:
    """A text for a message: at most `longest` characters of it."""
    return text if len(text) <= longest else f'{text[: longest - 1]}…'


def read_text(path: epath.Path, place: str) -> str:
    """The text of a gin file. Raises a ConfigError if it is not a file of text of at most 1 MiB."""
    try:
        data = path.read_bytes() if is_remote(path) else _read_local(path, place)
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f'{place}: {path} has more than {MOST_BYTES:,} bytes, so it is no gin file'
            )
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f'{place}: {path} is not text in UTF-8') from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f'{place}: cannot read {path}: {reason}') from error
    if '\0' in text:
        raise ConfigError(f'{place}: {path} contains a null byte, so it is no gin file')
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > _LONGEST_OF_FILE:
            raise ConfigError(
                f'{path}:{number}: the line has {len(line):,} characters: write at most '
                f'{_LONGEST_OF_FILE:,}'
            )
    return text


def _read_local(path: epath.Path, place: str) -> bytes:
    """Reads no more than is needed to see that a file is too large."""
    found = read_regular_file(path, MOST_BYTES + 1)
    if found is None:
        raise ConfigError(f'{place}: {path} is not a regular file')
    return found[0]


def check_inside(path: epath.Path, place: str, folders: Sequence[str]) -> None:
    """Checks that an included file is below one of the folders from which files may come.

    Raises a ConfigError if it is not.
    """
    text = os.fspath(path) if is_remote(path) else os.path.realpath(path)
    for folder in folders:
        base = folder if is_remote(folder) else os.path.realpath(folder)
        if base != os.sep and text.startswith(base.rstrip('/') + '/') and '/../' not in text:
            return
    raise ConfigError(
        f'{place}: {path} is not below the folder of a file of the command, the current folder or '
        f'the shipped configurations: allow it with --gin_search_paths={os.path.dirname(text)}'
    )


def check_value(value: Any, place: str, name: str) -> None:
    """Checks that no number or text in a value is of a kind that no setting has.

    `name` is the setting, for messages. Raises a BeyondLimitsError if a number is infinite, not a
    number or beyond 64 bits, if a text contains a null byte, or if it is an option of the compiler
    that names files.
    """
    for part in _leaves(value):
        if isinstance(part, int) and abs(part) > LARGEST_INTEGER:
            digits = int(part.bit_length() * math.log10(2)) + 1
            raise BeyondLimitsError(
                f'{place}: {name} is an integer of {digits:,} digits: use up to 19'
            )
        if isinstance(part, float) and not math.isfinite(part):
            raise BeyondLimitsError(f'{place}: {name} is {part}: write a finite number')
        if (isinstance(part, str) and '\0' in part) or (isinstance(part, bytes) and 0 in part):
            raise BeyondLimitsError(f'{place}: {name} contains a null byte')
        if isinstance(part, str) and _OPTION_WITH_FILES.fullmatch(part):
            raise BeyondLimitsError(
                f'{place}: {name} contains the compiler option {part}, by which the compiler may '
                f'write files, or run what it finds in them: set it in XLA_FLAGS'
            )


def count_values(value: Any) -> int:
    """The number of values that a value consists of, with those in it."""
    return sum(1 for _ in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one


class Expansion:
    """What values become when references are replaced by what they stand for.

    Nodes are macros and calls, written as in gin: `%NAME` and `@name`.
    """

    def __init__(self) -> None:
        self._needs: dict[str, collections.Counter[str]] = {}
        self._sizes: collections.Counter[str] = collections.Counter()
        self._places: dict[tuple[str, str], str] = {}

    def add(self, node: str, size: int, needs: Sequence[str], place: str) -> None:
        """Adds a value of a node: how many values it consists of, and the nodes in it."""
        self._sizes[node] += size
        self._needs.setdefault(node, collections.Counter()).update(needs)
        self._places |= {(node, needed): place for needed in needs}
        self._places[node, ''] = place

    def check(self) -> None:
        """Checks that no value needs itself, and that none becomes too large.

        Raises:
          ConfigError: if one does. gin would replace references until Python stops it, or for ever.
        """
        try:
            ordered = [*graphlib.TopologicalSorter(self._needs).static_order()]
        except graphlib.CycleError as error:
            circle = error.args[1][::-1]
            lines = [self._places[pair] for pair in itertools.pairwise(circle)]
            shown = ' needs '.join(circle)
            raise ConfigError(
                f'{lines[-1]}: {shortened(shown, 400)}: give one of them another value '
                f'(set at {shortened(", ".join(dict.fromkeys(lines)), 400)})'
            ) from None
        for node in ordered:
            needs = self._needs.get(node, collections.Counter())
            self._sizes[node] += sum(n * self._sizes[one] for one, n in needs.items())
            if self._sizes[node] > MOST_VALUES:
                raise ConfigError(
                    f'{self._places[node, ""]}: {node} would consist of more than '
                    f'{MOST_VALUES:,} values once all macros and calls in it are replaced'
                )
