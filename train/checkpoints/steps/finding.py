"""The steps in a folder of checkpoints: which are good, and from which a run resumes.

A good step has a manifest, and the files that it lists. Everything else is named and kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from etils import epath

from train.checkpoints.steps.manifest import (
    FILE as MANIFEST,
    DamagedCheckpoint,
    damaged,
    if_intact,
    read_manifest,
)
from train.checkpoints.steps.record import TEMPORARY, has_record, read_record
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
    """Finds the folders of a directory whose names are steps.

    Returns the path of each step, in ascending order, and the other names that look like
    checkpoints: all if there is no prefix, and those that begin with it otherwise.

    Args:
      directory: the folder of checkpoints. It need not exist.
      prefix: the beginning of the names, such as 'checkpoint_'.
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

    Raises a ConfigError if a step without a manifest is newer than all good ones, or if there is no
    good step left although there were some.

    Args:
      say: receives one line for each folder that is skipped.
      prefix: the beginning of the names of steps.
      below: only smaller steps are considered, because this one turned out to be damaged.
      needs_manifest: whether a step without a manifest is an error. It is accepted otherwise.
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
