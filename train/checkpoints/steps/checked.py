"""Checks files of a saved step against its manifest, each once, when it is first read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash
from etils import epath

from train.checkpoints.steps.manifest import (
    FileRecord,
    Manifest,
    check_content,
    is_array_file,
    read_manifest,
)
from train.paths import is_remote

NUM_THREADS = 4
PAGE_BYTES = 4096  # what reading without the page cache is aligned to
BLOCK_BYTES = 2**23


class CheckedFiles:
    """The files of a saved step. Several threads may check them at the same time.

    Args:
      folder: the folder of the step.
      manifest: what has been written into it.
    """

    def __init__(self, folder: epath.Path, manifest: Manifest):
        self._folder, self._manifest = folder, manifest
        self._checks = dict[str, Future[None]]()

    def check(self, names: Iterable[str]) -> None:
        """Checks files of the step, except those that another thread has begun to check.

        It returns when all of them are checked. Afterwards, a local file is in the page cache, so
        reading it right away does not wait for the disk.

        Args:
          names: the paths of the files below the folder. Chunks that were never written, because
            they have only the fill value, are not in the manifest and need no check.

        Raises:
          DamagedCheckpoint: if a file does not have the content that was written.
        """
        checks = []
        for name in names:
            if (record := self._manifest.files.get(name)) is None:
                continue
            ours = Future[None]()
            check = self._checks.setdefault(name, ours)
            if check is ours:
                try:
                    check_content(self._folder, name, record)
                    ours.set_result(None)
                except BaseException as error:
                    ours.set_exception(error)
                    raise
            checks.append(check)
        for check in checks:
            check.result()

    def read_into(self, name: str, out: np.ndarray) -> bool:
        """Reads a local file into an array that has its size, and checks the values on the way.

        The file is read once and past the page cache if the array begins and ends with a page.
        That is about twice as fast as checking a file and then reading it.

        Args:
          name: the path of the file below the folder.
          out: a contiguous array.

        Returns:
          Whether it has been read. Otherwise, the file is not known, has another size than the
          array, or is in a store of objects.

        Raises:
          DamagedCheckpoint: if the file does not have the content that was written.
        """
        record = self._manifest.files.get(name)
        if record is None or record.size != out.nbytes or is_remote(self._folder):
            return False
        check_content(self._folder, name, record, lambda path: _read(os.fspath(path), out))
        return True

    def check_together(self, names: Iterable[str]) -> None:
        """Checks many small files in several threads."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for _ in pool.map(self.check, ([name] for name in names)):
                pass

    def check_description(self) -> None:
        """Checks every file that does not belong to an array."""
        self.check_together(n for n in self._manifest.files if not is_array_file(n))

    def array_files(self) -> list[str]:
        """The files of all arrays."""
        return [name for name in self._manifest.files if is_array_file(name)]


def _read(path: str, out: np.ndarray) -> FileRecord:
    """Reads a file into a contiguous array, and returns what a manifest would say about it."""
    values = memoryview(out.reshape(-1).view(np.uint8).data)
    aligned = out.ctypes.data % PAGE_BYTES == 0 and len(values) % PAGE_BYTES == 0
    file, digest, size = _open(path, past_the_cache=aligned), xxhash.xxh3_128(), 0
    try:
        while size < len(values):
            count = os.readv(file, [values[size : size + BLOCK_BYTES]])
            if not count:
                break
            digest.update(values[size : size + count])
            size += count
        return FileRecord(os.fstat(file).st_size, digest.hexdigest())
    finally:
        os.close(file)


def _open(path: str, past_the_cache: bool) -> int:
    """Opens a file to read, past the page cache where the file system can do that."""
    if past_the_cache and hasattr(os, 'O_DIRECT'):
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
    return os.open(path, os.O_RDONLY)


def open_checked(folder: epath.Path) -> CheckedFiles | None:
    """The files of a saved step, or None if it has no manifest, so that nothing can be checked.

    Raises:
      DamagedCheckpoint: if the manifest itself is damaged.
    """
    manifest = read_manifest(folder)
    return None if manifest is None else CheckedFiles(folder, manifest)
