"""What must hold before the first step: all processes agree, and the layout is the expected one."""

from __future__ import annotations

import os
from typing import Any

import jax

from partitioning import Plan
from partitioning.plan import plan_diff
from train.config import TrainConfig
from train.errors import ConfigError
from train.paths import as_path, file_of_run
from train.processes.disagreements import digest
from train.processes.together import check_same, check_shared_folder
from train.running.changes import settings_of
from train.running.run import Run

_ADVICE = 'start the same command, with the same files, on all hosts'


def agree_on_settings(config: TrainConfig) -> None:
    """Checks that all processes have the same settings, before anything is made of them."""
    if jax.process_count() > 1:
        check_same('comparing the settings', settings_of(config), _ADVICE)


def agree_on_layout(run: Run) -> None:
    """Checks that all processes have the same devices, the same plan and the same MODEL_DIR."""
    if jax.process_count() == 1:
        return
    mesh = run.config.partitioner.mesh
    order = [(d.process_index, d.id, d.device_kind) for d in mesh.devices.flat]
    arrays = {
        f'layout of {row.path}': f'{row.shape} {row.dtype} {row.spec}' for row in run.plan.rows
    }
    axes = ', '.join(f'{name}={size}' for name, size in mesh.shape.items())
    values = {'mesh': axes, 'order of the devices': order, **arrays}
    check_same('planning the layout', values, _ADVICE)
    check_shared_folder('MODEL_DIR', run.directory)


def agree_on_program(lowered: Any) -> None:
    """Checks that all processes are about to compile the same train step.

    It finds what no setting shows: another version of the user's own code, for example, or a
    learning rate that a closure holds.
    """
    if jax.process_count() > 1:
        text = {'program of the train step': f'hash {digest(lowered.as_text())}'}
        check_same('tracing the train step', text, 'is the code of all hosts the same?')


class UnexpectedLayout(ConfigError):
    """The layout of a run differs from the expected one.

    `details` are the differences, as lines of text, which a command prints after the message. It
    has no default in the class, which would hide the value in the copies that gin makes of errors.
    """

    def __init__(self, message: str, details: str):
        super().__init__(message)
        self.details = details


def check_plan(plan: Plan, expected: str | os.PathLike[str]) -> None:
    """Checks that a run is laid out as a plan file says.

    Other compiler options are accepted, because they depend on the kind of the devices, and the
    plan may have been made on a machine without them. They are listed with other differences.
    `expected` is a plan file, or the folder of a run.

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
    changes = plan_diff(Plan.load(path), plan)
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
