"""The steps in a folder of checkpoints: which are good, and how steps are deleted.

A good step has a manifest, and the files that it lists. Everything else is named and kept; only
what this package wrote is ever deleted. There, the manifest of a step goes first, and a record of
it stays next to its folder until the end. So whatever an interrupted deletion leaves can be told
from a good step, and from a foreign folder.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from typing import Literal

from etils import epath

from train.checkpoints.steps import manifest, record
from train.checkpoints.steps.manifest import (
    FILE as MANIFEST,
    DamagedCheckpoint,
    damaged,
    if_intact,
    read_manifest,
)
from train.checkpoints.steps.record import TEMPORARY, has_record, read_record, unfinished_file
from train.checkpoints.steps.verifying import (
    CheckedFiles,
    FoundStep,
    Status,
    convert_command,
    list_differences,
)
from train.errors import ConfigError
from train.paths import is_remote


def examine(folder: epath.Path, step: int, *, contents: bool = False) -> FoundStep:
    """Finds out the status of a step by its names and sizes.

    `contents` says whether the files that do not belong to an array are compared with their
    checksums. The files of arrays are compared when they are read. Raises a ConfigError if a newer
    version of this package wrote it.
    """

    def found(status: Status, reason: str = '') -> FoundStep:
        return FoundStep(path=folder, step=step, status=status, reason=reason)

    try:
        manifest = read_manifest(folder)
        if manifest is not None:
            if manifest.step != step:
                raise DamagedCheckpoint(
                    f'checkpoint {folder} is a copy of step {manifest.step} under another name'
                )
            for difference in list_differences(folder, manifest):
                raise damaged(folder, difference)
            if contents:
                CheckedFiles(folder, manifest).check_description()
            return found('good')
    except DamagedCheckpoint as error:
        return found('damaged', str(error))
    if has_record(folder):
        return found('unfinished', f'checkpoint {folder} was not saved completely')
    is_folder = folder.is_dir() or folder.name.startswith('checkpoint_')  # or an old file of T5X
    is_known = is_folder and t5x_format(folder) is not None
    if not is_known and folder.is_dir() and _is_committed(folder):
        # Orbax has written one item, or a folder for each item.
        is_known = any((item / '_METADATA').exists() for item in (folder, *folder.iterdir()))
    if is_known:
        return found('without a manifest', f'checkpoint {folder} has no manifest')
    return found('not a checkpoint', f'{folder} is not a checkpoint')


def _is_committed(folder: epath.Path) -> bool:
    return not is_remote(folder) or (folder / 'commit_success.txt').exists()


def find_steps(directory: epath.Path, prefix: str = '') -> tuple[dict[int, epath.Path], list[str]]:
    """The path of each step in a directory, ascending, and other names that look like checkpoints.

    The latter are all names if there is no prefix such as 'checkpoint_', and those that begin with
    it otherwise. The directory need not exist.
    """
    steps, others = dict[int, epath.Path](), list[str]()
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = path.name.removeprefix(prefix)
        if not path.name.startswith(prefix) or path.name.startswith('.'):
            continue
        if name.isdecimal() and str(int(name)) == name:
            steps[int(name)] = path
        else:
            others.append(path.name)
    return dict(sorted(steps.items())), others


def is_copy(folder: epath.Path, step: int) -> bool:
    """Whether a damaged or unfinished step has been copied or renamed, so its name is wrong."""
    found = if_intact(read_manifest, folder) or if_intact(read_record, folder)
    return found is not None and found.step != step


def newest_saved(directory: epath.Path, prefix: str = '') -> int | None:
    """Returns the newest step with a manifest, good or not, or None. It looks at few files."""
    steps, _ = find_steps(directory, prefix)
    saved = (step for step, path in reversed(steps.items()) if (path / MANIFEST).exists())
    return next(saved, None)


def complete_steps(directory: epath.Path, prefix: str = '') -> list[int]:
    """Returns the good steps of a folder of checkpoints, in ascending order, by names and sizes."""
    steps, _ = find_steps(directory, prefix)
    return [step for step, path in steps.items() if examine(path, step).status == 'good']


def saved_steps(directory: epath.Path) -> list[int]:
    """Returns the steps of a folder that any program has saved, good or not, in ascending order."""
    steps, _ = find_steps(directory)
    found = (examine(path, step) for step, path in steps.items())
    return [one.step for one in found if one.status != 'not a checkpoint']


def newest_step(
    directory: epath.Path,
    say: Callable[[str], None],
    *,
    prefix: str = '',
    below: int | None = None,
    needs_manifest: bool = True,
) -> int | None:
    """Chooses the newest good step by looking at files only, or None if no save was completed.

    Args:
      say: receives one line for each folder that is skipped.
      below: only smaller steps are considered, because this one turned out to be damaged.
      needs_manifest: whether a step without a manifest is an error. It is accepted otherwise.

    Raises:
      ConfigError: if a step without a manifest is newer than all good ones, or if there is no good
        step left although there were some.
    """
    steps, others = find_steps(directory, prefix)
    for name in others if below is None else ():
        say(_describe_other(directory / name))
    lost = None if below is None else f'checkpoint {directory / f"{prefix}{below}"} is damaged'
    for step, path in reversed(steps.items()):
        if below is not None and step >= below:
            continue
        found = examine(path, step, contents=True)
        if found.status == 'good':
            return step
        if found.status == 'without a manifest':
            if not needs_manifest:
                return step
            raise ConfigError(
                f'{found.reason}: an older version or another program wrote it. Move it away, or '
                f'write a copy that has one: {convert_command(path)}'
            )
        kept = '' if found.status == 'unfinished' else 'it is kept, and '
        say(f'{found.reason}: {kept}an older one is looked for')
        record = if_intact(read_record, path) if found.status == 'unfinished' else None
        had_none_before = record is not None and record.previous is None
        if found.status == 'damaged' or (found.status == 'unfinished' and not had_none_before):
            lost = lost or found.reason
    if lost:
        raise ConfigError(
            f'no good checkpoint is left in {directory} ({lost}): put a copy of one there, or move '
            'the folder away to start from step 0'
        )
    return None


def _describe_other(path: epath.Path) -> str:
    if path.name.endswith(TEMPORARY) and has_record(path):
        return f'{path} is of a save that did not finish'
    why = ', because a step has no leading zeros' if path.name.isdecimal() else ''
    return f'{path} is not a checkpoint{why}: it is kept'


# Checkpoints of T5X.


def t5x_steps(directory: epath.Path) -> list[int]:
    """Returns the steps of T5X's checkpoints in the folder of a run, which need not exist."""
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (re.fullmatch(r'checkpoint_(\d+)', name) for name in names)
    steps = sorted(int(name[1]) for name in found if name)
    return [step for step in steps if t5x_format(directory / f'checkpoint_{step}')]


def usable_t5x_steps(directory: epath.Path) -> list[int]:
    """Returns the steps of T5X's checkpoints that are good, or have no manifest as T5X's own."""
    found = (examine(directory / f'checkpoint_{step}', step) for step in t5x_steps(directory))
    return [one.step for one in found if one.status in ('good', 'without a manifest')]


def t5x_format(checkpoint: epath.Path) -> Literal['orbax', 'legacy'] | None:
    """The format of a checkpoint of T5X, or None if it is not one, or is not complete."""
    if (checkpoint / 'state' / '_METADATA').exists():
        return 'orbax' if _is_committed(checkpoint) else None
    if (checkpoint / 'checkpoint').exists() or (checkpoint.exists() and not checkpoint.is_dir()):
        return 'legacy'
    return None


# What a save writes into the folder of a step, besides the manifest.
WRITTEN = (record.ITEM, 'state', 'dataset', '_CHECKPOINT_METADATA', 'commit_success.txt')
SECONDS_TO_REMOVE, SECONDS_BETWEEN_TRIES = 2.0, 0.05


def make_room(
    path: epath.Path, step: int, *, needs_manifest: bool, is_damaged: bool = False
) -> bool:
    """Removes what an earlier save of a step has left, and returns whether the step is complete.

    With `needs_manifest`, only a step with a manifest is complete. If it `is_damaged`, its content
    is, whatever its sizes. Raises a FileExistsError if something else is in the place of the step.
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
