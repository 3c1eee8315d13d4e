"""What others wrote: files, folders, JSON of a limited depth, text without control characters."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from typing import Any

# Files of this project are at most ten deep. Python's own limit is near 1000, and a value that
# just passes it breaks whatever walks through it afterwards.
_MAX_DEPTH = 64


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> Any:
    """Parses JSON, as `json.loads` does, whose lists and objects are not nested too deeply.

    Raises:
      ValueError: if the text is not JSON, or if it is nested more deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        pass
    else:
        level = [value]
        for _ in range(_MAX_DEPTH + 1):
            level = [x for x in level if isinstance(x, dict | list)]
            if not level:
                return value
            level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
    raise ValueError(f'its lists and objects are nested more than {_MAX_DEPTH} deep')


def read_regular_file(path: str | os.PathLike[str], most: int) -> tuple[bytes, int] | None:
    """Reads a file that may be something else, such as a pipe that nobody writes to, or a device.

    It returns at most `most` bytes and the mode of a regular file, or None if it is not one. A file
    that cannot be opened is an OSError.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            return None
        with open(file, 'rb', closefd=False) as opened:
            return opened.read(most), mode
    finally:
        os.close(file)


def is_own_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder of this user, and no link.

    Where all users can write, such as in /tmp, another one may have made something of its name.
    """
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def printable(text: str) -> str:
    """Replaces control characters, which could change the state of a terminal.

    Names of files, settings and messages of other libraries may have any characters. Line breaks
    remain.
    """
    if text.isprintable():
        return text
    return ''.join(c if c.isprintable() or c == '\n' else '\N{REPLACEMENT CHARACTER}' for c in text)
