"""Turns what a compiler writes to the standard error of the process into warnings."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

from partitioning.untrusted_text import printable

# Lines of compilers begin with their level, the date and the time: 'W0823 12:34:56.789012'.
_LINE = re.compile(rb'^([IWEF])\d{4} \d\d:\d\d:\d\d')
_PREFIX = re.compile(r'^[IWEF]\d{4} \S+\s+\d+ [^\]]*\] ?')
# Warnings that say something about the host, not about the program.
_NOT_ABOUT_PROGRAMS = (
    'slow_operation_alarm',
    'cpu_feature_guard',
    'TfrtCpuClient',
    'computation_p',
)


@contextlib.contextmanager
def read_compiler_log() -> Iterator[list[str]]:
    """Collects the warnings and errors of a compiler, which writes them past Python.

    Everything else that the process writes to its standard error passes through.

    Yields:
      A list, which holds the warnings when the context has ended, each once.
    """
    found: list[str] = []
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no standard error
        yield found
        return
    reading, writing = os.pipe()
    reader = threading.Thread(target=_read, args=(reading, original, found), daemon=True)
    reader.start()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield found
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(original, 2)  # closes the last end of the pipe, so the reader ends
        reader.join()
        os.close(original)
        found[:] = list(dict.fromkeys(found))


def _read(reading: int, original: int, found: list[str]) -> None:
    """Sorts lines until the pipe is closed: warnings into a list, others to the standard error."""
    with os.fdopen(reading, 'rb', buffering=0) as pipe:
        rest = b''
        while chunk := pipe.read(65536):
            *lines, rest = (rest + chunk).split(b'\n')
            for line in lines:
                _sort(line + b'\n', original, found)
            if rest and not rest.startswith((b'I', b'W', b'E', b'F')):  # an unfinished line of
                os.write(original, rest)  # a progress bar
                rest = b''
        if rest:
            _sort(rest, original, found)


def _sort(line: bytes, original: int, found: list[str]) -> None:
    if (level := _LINE.match(line)) is None:
        os.write(original, line)
    elif level[1] == b'F':
        reason = _PREFIX.sub('', line.decode(errors='replace').strip())
        hint = ': remove them' if 'flag' in reason.lower() else ''
        os.write(original, f'error: the compiler gave up: {printable(reason)}{hint}\n'.encode())
        os._exit(2)
    elif level[1] != b'I':
        text = _PREFIX.sub('', line.decode(errors='replace').strip())
        if text and not any(word in line.decode(errors='replace') for word in _NOT_ABOUT_PROGRAMS):
            found.append(text)
