"""Files that grow by whole records, such as metrics."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque

from etils import epath

from train.paths import is_remote, replacing

# An object in a store cannot be appended to, so it is written as a whole, at most this often.
SECONDS_BETWEEN_UPLOADS = 30.0
# The number of records that are kept while they cannot be written.
MAX_WAITING = 10_000


class AppendedFile:
    """A file that grows by whole records.

    A local file has each record at once. A record that could not be written, for example because
    the disk is full, leaves nothing behind, and is written with the next one. A file in a store of
    objects is written as a whole every SECONDS_BETWEEN_UPLOADS and at the end.

    Args:
      path: the file, which need not exist.

    Attributes:
      path: the file.

    Raises:
      OSError: if a file in a store exists, but cannot be read.
    """

    def __init__(self, path: epath.Path):
        self.path, self._remote = path, is_remote(path)
        self._contents = path.read_bytes() if self._remote and path.exists() else b''
        self._uploaded = time.monotonic()
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._broken_at: int | None = None

    def append(self, record: bytes) -> None:
        """Writes a record, after those that could not be written before.

        Raises:
          OSError: if it cannot be written now.
        """
        self._waiting.append(record)
        if not self._remote:
            self._write_waiting()
        elif time.monotonic() - self._uploaded >= SECONDS_BETWEEN_UPLOADS:
            self._upload()

    def replace(self, contents: bytes) -> None:
        """Gives the file other contents. If that fails, it keeps those that it has."""
        if self._remote:
            self._contents = contents
        with replacing(self.path) as unfinished:
            unfinished.write_bytes(contents)

    def close(self) -> None:
        """Writes what is left.

        Raises:
          OSError: if it cannot be written.
        """
        if self._remote:
            self._upload()
        elif self._waiting:
            self._write_waiting()

    def _write_waiting(self) -> None:
        with open(self.path, 'ab', buffering=0) as file:
            if self._broken_at is not None:
                file.truncate(self._broken_at)
                self._broken_at = None
            end, left = os.fstat(file.fileno()).st_size, memoryview(b''.join(self._waiting))
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                error.filename = str(self.path)  # Without it, the message would not name the file.
                self._broken_at = end
                with contextlib.suppress(OSError):
                    file.truncate(end)
                    self._broken_at = None
                raise
        self._waiting.clear()

    def _upload(self) -> None:
        self._contents += b''.join(self._waiting)
        self._waiting.clear()
        self.path.write_bytes(self._contents)
        self._uploaded = time.monotonic()
