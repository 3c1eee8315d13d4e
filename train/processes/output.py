"""Output of one process among several: lines begin with its index, and C++ writes to a file.

Libraries of other languages write to the file descriptors 1 and 2 themselves: the connections of
collectives, for example, and long traces of the runtime when another process has died. They would
hide the one line that says what happened.

This module is imported before all others, so it imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from partitioning.untrusted_text import is_own_folder


class _Terminal:
    """Where Python prints.

    Attributes:
      prefix: how lines of Python begin.
      out, err: the file descriptors of standard output and standard error.
    """

    prefix = ''
    out, err = 1, 2


class _PrefixedStream(io.TextIOBase):
    """A text stream whose lines begin with a prefix, and reach a file descriptor whole."""

    def __init__(self, fd: int, prefix: str):
        self._fd, self._prefix, self._line = fd, prefix, ''

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return 'utf-8'

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split('\n')
        if lines:
            # In one call, so that the lines of two threads do not mix.
            _write(self._fd, ''.join(f'{self._prefix}{line}\n' for line in lines))
        return len(text)

    def close(self) -> None:
        if self._line:
            self.write('\n')


def begin(index: int, folder: str | os.PathLike[str] | None = None) -> Path:
    """Prefixes what Python prints, and sends the output of C++ libraries to the file it returns.

    `folder` is the folder of the file, by default one for this user in the system's folder for
    temporary files. Raises an OSError if the file cannot be written.
    """
    path = Path(folder or _folder_of_logs()) / f'process-{index}-{os.getpid()}.log'
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _Terminal.prefix = f'[{index}] '
    _Terminal.out, _Terminal.err = os.dup(1), os.dup(2)
    for fd in (1, 2):
        os.dup2(file, fd)
    os.close(file)
    sys.stdout = _PrefixedStream(_Terminal.out, _Terminal.prefix)
    sys.stderr = _PrefixedStream(_Terminal.err, _Terminal.prefix)
    if absl := sys.modules.get('absl.logging'):
        absl.get_absl_handler().python_handler.stream = sys.stderr
    return path


def _folder_of_logs() -> Path:
    """The folder of this user, or a new one if another user has made something of that name."""
    folder = Path(tempfile.gettempdir()) / f'meshwright-logs-{os.geteuid()}'
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_own_folder(folder):
        return Path(tempfile.mkdtemp(prefix='meshwright-logs-'))
    folder.chmod(0o700)  # Whoever can write to it could make a link in the place of a log.
    return folder


def error_fd() -> int:
    """The file descriptor of standard error, for what Python prints."""
    return _Terminal.err


def print_error(line: str) -> None:
    """Writes a line to standard error, past buffers that a stuck thread may hold locked."""
    cursor = '\x1b[?25h\n' if os.isatty(_Terminal.err) else ''  # A progress bar has hidden it.
    with contextlib.suppress(OSError):
        _write(_Terminal.err, f'{cursor}{_Terminal.prefix}{line}\n')


def enumerated(items: Sequence[str]) -> str:
    """Joins words, as in 'a, b and c'."""
    return ' and '.join(filter(None, [', '.join(items[:-1]), items[-1]]))


def _write(fd: int, text: str) -> None:
    data = text.encode(errors='replace')
    while data:
        data = data[os.write(fd, data) :]
