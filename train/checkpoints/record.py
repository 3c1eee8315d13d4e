"""The record of a saved step: what it is, next to its arrays, in files that people can read.

Orbax writes it with the arrays, in the same save. So a folder with a record is of this package, and
if it has no manifest, its save did not finish.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from etils import epath

from partitioning.untrusted_text import parse_json
from train.checkpoints.manifest import DamagedCheckpoint, package_versions
from train.errors import first_line

ITEM = 'run'  # the folder of the record in that of the step
FILE = 'step.json'
COMMITTED = 'commit_success.txt'  # Orbax adds it to each item.


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known about a saved step.

    Attributes:
      step: the last finished step.
      previous: the newest good step when the save began, or None if there was none.
      pending: the names of evaluations of this step that a signal has interrupted.
      scores: the metrics and scores of the step, by name.
      versions: the versions of the packages that wrote it.
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
    """Whether the folder of a step, finished or not, is of this package."""
    return (folder / ITEM / FILE).exists()


def read_record(folder: epath.Path) -> StepRecord | None:
    """Reads the record of a step, or returns None if the folder has none.

    Args:
      folder: the folder of the step.

    Raises:
      DamagedCheckpoint: if it cannot be read.
    """
    if not has_record(folder):
        return None
    try:
        data = parse_json((folder / ITEM / FILE).read_text())
        others = [p for p in (folder / ITEM).iterdir() if p.name not in (FILE, COMMITTED)]
        return StepRecord(
            step=data['step'],
            previous=data['previous'],
            pending=tuple(data['pending']),
            scores=data['scores'],
            versions=data['versions'],
            texts={path.name: path.read_text() for path in others},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(
            f'checkpoint {folder} is damaged: {ITEM}/{FILE} cannot be read ({first_line(error)})'
        ) from error
