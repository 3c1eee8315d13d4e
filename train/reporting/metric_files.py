"""Files of metrics, which grow by whole records: lines of text, or events of TensorBoard."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from etils import epath

from train.errors import import_optional
from train.paths import is_remote, replacing

# An object in a store cannot be appended to, so it is written as a whole, at most this often.
SECONDS_BETWEEN_UPLOADS = 30.0
# The number of records that are kept while they cannot be written.
MAX_WAITING = 10_000


class AppendedFile:
    """A file that grows by whole records.

    A local file has each record at once. A record that could not be written, for example because
    the disk is full, leaves nothing behind, and is written with the next one. A file in a store of
    objects is written as a whole every SECONDS_BETWEEN_UPLOADS and at the end. `path` is the file,
    which need not exist. Raises an OSError if a file in a store exists, but cannot be read.
    """

    def __init__(self, path: epath.Path):
        self.path, self._remote = path, is_remote(path)
        self._contents = path.read_bytes() if self._remote and path.exists() else b''
        self._uploaded = time.monotonic()
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._broken_at: int | None = None

    def append(self, record: bytes) -> None:
        """Writes a record, after those that could not be written before.

        Raises an OSError if it cannot be written now.
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
        """Writes what is left. Raises an OSError if it cannot be written."""
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


class EventFile:
    """An event file of TensorBoard, which has each event at once.

    tensorboardX makes the events. Its own writer is not used, because it writes in a thread: if
    that dies, for example because the disk is full, the queue to it blocks the run for ever.

    Args:
      suffix: the end of the name of the file. Names contain the time in seconds, so writers that
        begin in the same second need different ones.
      purge_step: TensorBoard hides events of this step and later ones in older files. None hides
        nothing.
    """

    def __init__(
        self, directory: epath.Path, user: str, *, suffix: str = '', purge_step: int | None = None
    ):
        self._package = functools.partial(import_optional, extra='train', user=user)
        self._protos = self._package('tensorboardX.proto.event_pb2')
        self._checksum = self._package('tensorboardX.record_writer').masked_crc32c
        directory.mkdir(parents=True, exist_ok=True)
        now = int(time.time())
        name = f'events.out.tfevents.{now}.{socket.gethostname()}{suffix}'
        self._file = AppendedFile(directory / name)
        event = functools.partial(self._protos.Event, wall_time=float(now))
        self._start = self._frame(event(file_version='brain.Event:2'))
        if purge_step is not None:
            log = self._protos.SessionLog(status=self._protos.SessionLog.START)
            self._start += self._frame(event(step=purge_step, session_log=log))

    def write_scalars(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Writes numbers by name, in one event.

        Raises an OSError if the file cannot be written now. The next call writes them, too.
        """
        make = self._package('tensorboardX.summary').scalar
        self._write(step, [make(name, value) for name, value in scalars])

    def write_texts(self, step: int, texts: Iterable[tuple[str, str]]) -> None:
        """Writes texts by name, in Markdown; see `write_scalars`."""
        make = self._package('tensorboardX.summary').text
        self._write(step, [make(name, value) for name, value in texts])

    def close(self) -> None:
        """Writes what is left. Raises an OSError if it cannot be written."""
        self._file.close()

    def _write(self, step: int, summaries: Iterable[Any]) -> None:
        event = self._protos.Event(wall_time=time.time(), step=step)
        for summary in summaries:
            event.summary.MergeFrom(summary)
        start, self._start = self._start, b''
        self._file.append(start + self._frame(event))

    def _frame(self, event: Any) -> bytes:
        """An event as a record of the TFRecord format: its length, the event, and checksums."""
        data = event.SerializeToString()
        length = struct.pack('<Q', len(data))
        framed = b''
        for part in (length, data):
            framed += part + struct.pack('<I', self._checksum(part))
        return framed
