"""The steps in a folder of checkpoints, found by looking at names and files only."""

from __future__ import annotations

import re
from typing import Literal

from etils import epath

from train.paths import is_remote


def complete_steps(directory: epath.Path) -> list[int]:
    """Returns the steps of complete checkpoints, in ascending order.

    Orbax treats every directory whose name is a number as a checkpoint. This function skips those
    without the last file that a save writes.
    """
    if not directory.is_dir():
        return []
    steps = (int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    return sorted(step for step in steps if is_complete(directory / str(step)))


def is_complete(checkpoint: epath.Path) -> bool:
    """Whether a checkpoint has the last file that a save writes."""
    last_file = 'commit_success.txt' if is_remote(checkpoint) else '_CHECKPOINT_METADATA'
    return (checkpoint / last_file).exists()


def t5x_steps(directory: epath.Path) -> list[int]:
    """Returns the steps of T5X's checkpoints in a folder, `checkpoint_<step>`, in ascending order.

    Args:
      directory: the folder of a run. It need not exist.
    """
    if not directory.is_dir():
        return []
    names = (re.fullmatch(r'checkpoint_(\d+)', path.name) for path in directory.iterdir())
    steps = sorted(int(name[1]) for name in names if name)
    return [step for step in steps if t5x_format(directory / f'checkpoint_{step}')]


def t5x_format(checkpoint: epath.Path) -> Literal['orbax', 'legacy'] | None:
    """The format of a checkpoint of T5X, or None if it is not one, or is not complete."""
    if (checkpoint / 'state' / '_METADATA').exists():
        complete = not is_remote(checkpoint) or (checkpoint / 'commit_success.txt').exists()
        return 'orbax' if complete else None
    if (checkpoint / 'checkpoint').exists() or (checkpoint.exists() and not checkpoint.is_dir()):
        return 'legacy'
    return None
