"""A layout that a run must have: the run ends before it starts if it has another."""

from __future__ import annotations

import os

from partitioning import Plan
from partitioning.plan import diff
from train.errors import ConfigError
from train.paths import as_path
from train.reporting.gin_text import file_of_run


class UnexpectedLayout(ConfigError):
    """The layout of a run differs from the expected one.

    Attributes:
      details: the differences, as lines of text, which a command prints after the message. It has
        no default in the class, which would hide the value in the copies that gin makes of errors.
    """

    def __init__(self, message: str, details: str):
        super().__init__(message)
        self.details = details


def check_plan(plan: Plan, expected: str | os.PathLike[str]) -> None:
    """Checks that a run is laid out as a plan file says.

    Other compiler options are accepted, because they depend on the kind of the devices, and the
    plan may have been made on a machine without them. They are listed with other differences.

    Args:
      plan: the plan of the run.
      expected: a plan file, or the folder of a run.

    Raises:
      UnexpectedLayout: if the meshes or the arrays differ.
      ConfigError: if there is no such file.
      ValueError: if it is not a plan.
    """
    path = as_path('--expect_plan', expected)
    path = file_of_run(path, 'plan.json') if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f'--expect_plan {path}: no such file; write the plan.json of a run, or '
            'the precompile-plan.json of `meshwright precompile`'
        )
    changes = diff(Plan.load(path), plan)
    if not changes.changes_layout:
        return
    counts = {
        'are missing': len(changes.removed),
        'are new': len(changes.added),
        'differ': len(changes.changed),
    }
    found = [f'{count:,} {what}' for what, count in counts.items() if count]
    arrays = f'of {len(plan.rows):,} arrays, {" and ".join(found)}' if found else 'the mesh differs'
    raise UnexpectedLayout(
        f'the layout is not the one of --expect_plan {path}: {arrays}; nothing has been written. '
        'Undo the change that caused it, or save the new plan in its place',
        str(changes),
    )
