"""The manifest of a new step, made by all processes together, in the background.

Each process reads its share of the files back and leaves a part of the manifest in the folder of
the step, which all share. Process 0 waits for the parts and writes the manifest. Collectives are
not used, because the training thread uses them at the same time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
from etils import epath

from train.checkpoints.steps.manifest import (
    FILE,
    NUM_THREADS,
    PART,
    FileRecord,
    Manifest,
    find_files,
    package_versions,
    record_file,
)
from train.paths import is_remote
from train.processes.activity import waiting

SECONDS_TO_WAIT = 3600.0
SECONDS_BETWEEN_LOOKS = 0.05


def complete_step(folder: epath.Path, step: int) -> None:
    """Writes the manifest of a step, or this process's part of it, when its files are on the disk.

    Args:
      folder: the folder of the step, which Orbax has committed.
      step: the step.

    Raises:
      OSError: if a file cannot be read, or the manifest cannot be written.
      TimeoutError: if the part of another process is missing after an hour.
    """
    count, index = jax.process_count(), jax.process_index()
    names = sorted(find_files(folder))
    files = _record_files(folder, names[index::count])
    if index:
        _write_atomically(_part(folder, index), json.dumps(files))
        return
    for other in range(1, count):
        files |= _wait_for_part(_part(folder, other))
    # On shared storage, a process can miss a file that another one has just written.
    files |= _record_files(folder, [name for name in names if name not in files])
    if not is_remote(folder):
        _sync_folder(folder)
        _sync_folder(folder.parent)
    write_manifest(folder, Manifest(step=step, files=files, versions=package_versions()))
    for other in range(1, count):
        _part(folder, other).unlink(missing_ok=True)


def _part(folder: epath.Path, process: int) -> epath.Path:
    return folder / f'{PART}{process}.json'


def _wait_for_part(path: epath.Path) -> dict[str, FileRecord]:
    """Reads the part of another process as soon as it is there."""
    give_up = time.monotonic() + SECONDS_TO_WAIT
    with waiting():
        while not path.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f'{path} is still missing after {SECONDS_TO_WAIT:,.0f} s')
            time.sleep(SECONDS_BETWEEN_LOOKS)
    return {name: FileRecord(*record) for name, record in json.loads(path.read_text()).items()}


def _record_files(folder: epath.Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Records files of a step that has just been saved, when they are on the disk.

    Args:
      folder: the folder of the step.
      names: the paths of the files below it.

    Raises:
      OSError: if a file cannot be read or written to the disk.
    """
    names = list(names)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        records = pool.map(lambda name: record_file(folder / name, durable=True), names)
        return dict(zip(names, records, strict=True))


def write_manifest(folder: epath.Path, manifest: Manifest) -> None:
    """Writes the manifest of a step, which makes it a good one. It is there as a whole or not.

    Raises:
      OSError: if it cannot be written.
    """
    _write_atomically(folder / FILE, manifest.to_text())


def _write_atomically(path: epath.Path, text: str) -> None:
    """Writes a text that is there as a whole or not, and is on the disk at the end.

    Args:
      path: the file; in a store of objects, writing an object is atomic by itself.
      text: its content.
    """
    if is_remote(path):
        path.write_text(text)
        return
    temporary = path.parent / f'{PART}{path.name}'
    with temporary.open('w') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: epath.Path) -> None:
    """Waits until the names of the files in a local folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
