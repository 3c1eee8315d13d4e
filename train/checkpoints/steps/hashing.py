"""The manifest of a new step, made by all processes together, in the background.

Each process reads its share of the files back and leaves a part of the manifest in the folder of
the step, which all share. Process 0 waits for the parts and writes the manifest. Collectives are
not used, because the training thread uses them at the same time.
"""

from __future__ import annotations

import json
import time

import jax
from etils import epath

from train.checkpoints.steps.manifest import (
    PART,
    FileRecord,
    Manifest,
    find_files,
    package_versions,
    record_files,
    sync_folder,
    write_atomically,
    write_manifest,
)
from train.paths import is_remote

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
    files = record_files(folder, names[index::count])
    if index:
        write_atomically(_part(folder, index), json.dumps(files))
        return
    for other in range(1, count):
        files |= _wait_for_part(_part(folder, other))
    # On shared storage, a process can miss a file that another one has just written.
    files |= record_files(folder, [name for name in names if name not in files])
    if not is_remote(folder):
        sync_folder(folder)
        sync_folder(folder.parent)
    write_manifest(folder, Manifest(step=step, files=files, versions=package_versions()))
    for other in range(1, count):
        _part(folder, other).unlink(missing_ok=True)


def _part(folder: epath.Path, process: int) -> epath.Path:
    return folder / f'{PART}{process}.json'


def _wait_for_part(path: epath.Path) -> dict[str, FileRecord]:
    """Reads the part of another process as soon as it is there."""
    give_up = time.monotonic() + SECONDS_TO_WAIT
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f'{path} is still missing after {SECONDS_TO_WAIT:,.0f} s')
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return {name: FileRecord(*record) for name, record in json.loads(path.read_text()).items()}
