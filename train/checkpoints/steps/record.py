"""Describes a saved step in files that people can read, next to its arrays.

Orbax writes it with the arrays, in the same save. So this package has written every folder with a
record, and if such a folder has no manifest, its save did not finish.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from etils import epath

from partitioning.untrusted_text import parse_json
from train.checkpoints.steps.manifest import damaged, package_versions
from train.errors import first_line

ITEM = 'run'  # the folder of the record, inside the folder of the step
FILE = 'step.json'
COMMITTED = 'commit_success.txt'  # Orbax adds it to each item.
TEMPORARY = '.orbax-checkpoint-tmp'  # Orbax renames a folder with this ending when it is complete.
UNFINISHED = '.unfinished'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known about a saved step.

    Attributes:
      step: the last finished step.
      previous: the newest good step when the save began, or None if there was none.
      pending: the names of evaluations of this step that a signal has interrupted.
      texts: the files that describe the run, by name: 'config.gin', 'plan.json', 'data.json'.
    """

    step: int
    previous: int | None = None
    pending: tuple[str, ...] = ()
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=package_versions)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """The content of each file, by its name."""
        data = {
            'step': self.step,
            'previous': self.previous,
            'pending': list(self.pending),
            'scores': dict(self.scores),
            'versions': dict(self.versions),
        }
        return {FILE: json.dumps(data, indent=1) + '\n', **self.texts}


def has_record(folder: epath.Path) -> bool:
    """Whether this package has written the folder of a step, finished or not."""
    return folder.exists() and _find(folder) is not None


def read_record(folder: epath.Path) -> StepRecord | None:
    """Reads the record of a step, or returns None if the folder has none.

    `folder` is the folder of the step, or Orbax's temporary folder of it. Raises a
    DamagedCheckpoint if it cannot be read.
    """
    path = _find(folder) if folder.exists() else None
    if path is None:
        return None
    others = path.parent.iterdir() if path.name == FILE else ()
    try:
        data = parse_json(path.read_text())
        return StepRecord(
            step=data['step'],
            previous=data['previous'],
            pending=tuple(data['pending']),
            scores=data['scores'],
            versions=data['versions'],
            texts={p.name: p.read_text() for p in others if p.name not in (FILE, COMMITTED)},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, f'{ITEM}/{FILE} cannot be read ({first_line(error)})') from error


def unfinished_file(folder: epath.Path) -> epath.Path:
    """The file next to the folder of a step that has its record while it is saved or deleted.

    Files of a step are written and deleted in any order. This file is created before the first of
    them and removed after the last, so a step that a kill has left incomplete is recognized.
    """
    return folder.parent / f'.{folder.name.removesuffix(TEMPORARY)}{UNFINISHED}'


def _find(folder: epath.Path) -> epath.Path | None:
    items = (folder / ITEM / FILE, folder / f'{ITEM}{TEMPORARY}' / FILE)
    return next((path for path in (*items, unfinished_file(folder)) if path.exists()), None)
