"""Makes room for a step, and deletes steps. Only what this package wrote is ever deleted.

The manifest of a step goes first, and a record of it stays next to its folder until the end. So
whatever an interrupted deletion leaves can be told from a good step, and from a foreign folder.
"""

from __future__ import annotations

import contextlib
import shutil
import time

from etils import epath

from train.checkpoints.steps import manifest, record
from train.checkpoints.steps.finding import examine, find_steps, is_copy
from train.checkpoints.steps.manifest import if_intact, read_manifest
from train.checkpoints.steps.record import TEMPORARY, unfinished_file
from train.paths import is_remote

# What a save writes into the folder of a step, besides the manifest.
WRITTEN = (record.ITEM, 'state', 'dataset', '_CHECKPOINT_METADATA', 'commit_success.txt')
SECONDS_TO_REMOVE, SECONDS_BETWEEN_TRIES = 2.0, 0.05


def make_room(
    path: epath.Path, step: int, *, needs_manifest: bool, is_damaged: bool = False
) -> bool:
    """Removes what an earlier save of a step has left, and returns whether the step is complete.

    Raises a FileExistsError if something else is in the place of the step.

    Args:
      path: the folder of the step, which need not exist.
      needs_manifest: whether only a step with a manifest is taken for a complete one.
      is_damaged: whether the content of the step is known to be damaged, whatever its sizes.
    """
    if path.exists():
        found = examine(path, step)
        is_whole = found.status == 'good' or (
            found.status == 'without a manifest' and not needs_manifest
        )
        if is_whole and not is_damaged:
            return True
        if found.status not in ('good', 'damaged', 'unfinished') or is_copy(path, step):
            raise FileExistsError(f'{found.reason} and is in its place: move it away')
        delete_step(path)
    temporary = _temporary_of(path)
    if temporary.exists():
        if not record.has_record(temporary) or is_copy(temporary, step):
            raise FileExistsError(f'{temporary} of another program is in its way: move it away')
        shutil.rmtree(temporary)
    return False


def delete_step(path: epath.Path) -> None:
    """Deletes what a save has written into the folder of a step. Other files stay, in the folder.

    `path` is the folder of a step, finished or not, with a record or a manifest of this package.
    Raises an OSError if it cannot be deleted.
    """
    listed = if_intact(read_manifest, path)
    names = {name.partition('/')[0] for name in listed.files} if listed else set()
    names |= {p.name for p in path.iterdir() if p.name.startswith(manifest.PART)} | {*WRITTEN}
    with contextlib.suppress(OSError):  # A full disk must not prevent a deletion.
        about = path / record.ITEM / record.FILE
        unfinished_file(path).write_text(about.read_text() if about.exists() else '')
    (path / manifest.FILE).unlink(missing_ok=True)
    for name in names:
        item = path / name
        if item.is_dir():
            item.rmtree() if is_remote(item) else shutil.rmtree(item)
        else:
            item.unlink(missing_ok=True)
    if not is_remote(path) and not any(path.iterdir()):
        path.rmdir()
    unfinished_file(path).unlink(missing_ok=True)


def delete_unfinished(directory: epath.Path, prefix: str, below: int) -> None:
    """Deletes what saves and deletions of this package before a good step have left unfinished.

    Raises an OSError if something cannot be deleted.
    """
    steps, others = find_steps(directory, prefix)
    for name in others:
        step, path = name.removeprefix(prefix).removesuffix(TEMPORARY), directory / name
        if not name.endswith(TEMPORARY) or not step.isdecimal() or int(step) >= below:
            continue
        if record.has_record(path) and not is_copy(path, int(step)):
            shutil.rmtree(path)
            unfinished_file(path).unlink(missing_ok=True)
    for step_number, path in steps.items():
        if step_number >= below:
            continue
        if examine(path, step_number).status == 'unfinished' and not is_copy(path, step_number):
            delete_step(path)
        unfinished_file(path).unlink(missing_ok=True)


def remove_failed(path: epath.Path) -> None:
    """Removes what a failed save has written for the folder of a step, to free its space.

    Writes that have not ended yet would create the folder again, so it tries for two seconds.
    """
    temporary, give_up = _temporary_of(path), time.monotonic() + SECONDS_TO_REMOVE
    while temporary.exists() and time.monotonic() < give_up:
        shutil.rmtree(temporary, ignore_errors=True)
        time.sleep(SECONDS_BETWEEN_TRIES)
    if not temporary.exists() and not path.exists():
        with contextlib.suppress(OSError):  # The disk may be read-only.
            unfinished_file(path).unlink(missing_ok=True)


def _temporary_of(path: epath.Path) -> epath.Path:
    """The folder that Orbax renames when it is complete."""
    return path.parent / f'{path.name}{TEMPORARY}'
