"""Compares the files of saved steps with their manifest, while they are read or all at once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
import xxhash
from etils import epath

from train.checkpoints.steps.manifest import (
    NUM_THREADS,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    damaged,
    find_files,
    if_intact,
    is_array_file,
    read_manifest,
    record_file,
)
from train.errors import first_line
from train.paths import is_remote

PAGE_BYTES = 4096  # what reading without the page cache is aligned to
BLOCK_BYTES = 2**23

Status = Literal['good', 'damaged', 'unfinished', 'without a manifest', 'not a checkpoint']


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundStep:
    """A folder that may be a saved step.

    Attributes:
      status: 'good'; 'damaged', if the files differ from its manifest; 'unfinished', if a save or a
        deletion by this package did not finish; 'without a manifest', if an older version of this
        package or another program wrote it; or 'not a checkpoint'.
      reason: why it is not good, as a sentence that begins with the path.
    """

    path: epath.Path
    step: int
    status: Status
    reason: str = ''


def list_differences(folder: epath.Path, manifest: Manifest) -> Iterator[str]:
    """Yields what differs between a folder and the files of its manifest. No file is read.

    An unlisted file in the folder of an item counts, too, because it could be taken for a part of
    an array. Hidden files are ignored, because operating systems create them.
    """
    sizes = find_files(folder)
    for name, record in sorted(manifest.files.items()):
        if name not in sizes:
            yield f'{name} is missing'
        elif sizes[name] != record.size:
            yield f'{name} has {sizes[name]:,} bytes instead of {record.size:,}'
    for name in sorted(sizes.keys() - manifest.files.keys()):
        if '/' in name and not name.rpartition('/')[2].startswith('.'):
            yield f'{name} has been added to it'


def check_content(
    folder: epath.Path,
    name: str,
    record: FileRecord,
    read: Callable[[epath.Path], FileRecord] = record_file,
) -> None:
    """Checks one file against its checksum; `read` returns its size and checksum.

    Raises a DamagedCheckpoint if the file cannot be read, or has another size or content.
    """
    try:
        found = read(folder / name)
    except OSError as error:
        raise damaged(folder, f'{name} cannot be read ({first_line(error)})') from error
    if found != record:
        raise damaged(folder, f'{name} does not have the content that was written')


# While a step is read.


class CheckedFiles:
    """The files of a saved step. Several threads may check them at the same time."""

    def __init__(self, folder: epath.Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._checks = dict[str, Future[None]]()

    def check(self, names: Iterable[str]) -> None:
        """Checks files of the step, except those that another thread has begun to check.

        It returns when all of them are checked. Afterwards, a local file is in the page cache, so
        reading it right away does not wait for the disk. Chunks that were never written, because
        they have only the fill value, are not in the manifest and need no check. Raises a
        DamagedCheckpoint if a file does not have the content that was written.
        """
        checks = []
        for name in names:
            if (record := self.manifest.files.get(name)) is None:
                continue
            ours = Future[None]()
            check = self._checks.setdefault(name, ours)
            if check is ours:
                try:
                    check_content(self.folder, name, record)
                    ours.set_result(None)
                except BaseException as error:
                    ours.set_exception(error)
                    raise
            checks.append(check)
        for check in checks:
            check.result()

    def read_into(self, name: str, out: np.ndarray) -> bool:
        """Reads a local file into a contiguous array, and checks the values on the way.

        The file is read once and past the page cache if the array begins and ends with a page.
        That is about twice as fast as checking a file and then reading it. Returns whether it has
        been read. Otherwise, the file is not known, has another size than the array, or is in a
        store of objects. Raises a DamagedCheckpoint if the file has changed since it was written.
        """
        record = self.manifest.files.get(name)
        if record is None or record.size != out.nbytes or is_remote(self.folder):
            return False
        check_content(self.folder, name, record, lambda path: _read(os.fspath(path), out))
        return True

    def check_together(self, names: Iterable[str]) -> None:
        """Checks many small files in several threads."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(self.check, ([name] for name in names)))

    def check_description(self) -> None:
        """Checks every file that does not belong to an array."""
        self.check_together(n for n in self.manifest.files if not is_array_file(n))


def _read(path: str, out: np.ndarray) -> FileRecord:
    """Reads a file into a contiguous array, and returns what a manifest would say about it."""
    values = memoryview(out.reshape(-1).view(np.uint8).data)
    aligned = out.ctypes.data % PAGE_BYTES == 0 and len(values) % PAGE_BYTES == 0
    file = None
    if aligned and hasattr(os, 'O_DIRECT'):
        with contextlib.suppress(OSError):  # Some file systems cannot read past the page cache.
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    file = os.open(path, os.O_RDONLY) if file is None else file
    digest, size = xxhash.xxh3_128(), 0
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


def open_checked(folder: epath.Path) -> CheckedFiles | None:
    """The files of a saved step, or None if it has no manifest, so that nothing can be checked.

    Raises a DamagedCheckpoint if the manifest itself is damaged.
    """
    manifest = read_manifest(folder)
    return None if manifest is None else CheckedFiles(folder, manifest)


# All files of a step.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """The result for one checkpoint.

    Attributes:
      found: where it is, and what its names and sizes say.
      status: 'good' if all files have the content that was written; see `FoundStep`.
      reasons: why it is not good, one line for each damaged file.
    """

    found: FoundStep
    status: Status
    reasons: Sequence[str] = ()
    num_files: int = 0
    nbytes: int = 0


def size_to_read(found: FoundStep) -> int:
    """The size of the files that `verify` reads, in bytes."""
    manifest = if_intact(read_manifest, found.path)
    return sum(record.size for record in manifest.files.values()) if manifest else 0


def verify(found: FoundStep, report: Callable[[int], None] = lambda size: None) -> Verified:
    """Reads all files of a checkpoint, and compares them with its manifest; reports their bytes."""
    manifest = if_intact(read_manifest, found.path)
    if manifest is None:
        reasons = [found.reason] if found.status == 'damaged' else []
        if found.status == 'without a manifest':
            reasons = [
                'it cannot be verified, because it has no checksums; a copy has them, which this '
                f'command writes: {convert_command(found.path)}'
            ]
        return Verified(found=found, status=found.status, reasons=reasons)
    sizes = find_files(found.path)
    reasons = [] if found.step == manifest.step else [found.reason]
    reasons += [str(damaged(found.path, what)) for what in list_differences(found.path, manifest)]
    present = {n: r for n, r in manifest.files.items() if sizes.get(n) == r.size}

    def check(name: str) -> str | None:
        try:
            check_content(found.path, name, present[name])
        except DamagedCheckpoint as error:
            return str(error)
        finally:
            report(present[name].size)
        return None

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        reasons += [reason for reason in pool.map(check, sorted(present)) if reason]
    return Verified(
        found=found,
        status='damaged' if reasons else 'good',
        reasons=reasons,
        num_files=len(present),
        nbytes=sum(record.size for record in present.values()),
    )


def all_good(results: Sequence[Verified]) -> bool:
    """Whether there is a good checkpoint, and none is damaged or cannot be verified.

    What a kill has left unfinished, and folders that are not checkpoints, are not used by a run.
    """
    statuses = {result.status for result in results}
    return 'good' in statuses and not statuses & {'damaged', 'without a manifest'}


def convert_command(path: epath.Path) -> str:
    """The command that writes a copy of a step, with checksums, next to its run."""
    run = path.parent.parent if path.parent.name == 'checkpoints' else path.parent
    command = ['meshwright', 'checkpoint', 'convert', str(path), f'{run}-converted']
    return shlex.join([*command, '--to=meshwright'])
