"""What all processes of a run must have in common before its first step: see each function."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax

from train.config import TrainConfig
from train.processes.agreement import digest
from train.processes.together import check_same, check_shared_folder
from train.reporting.gin_text import operative_text
from train.running.run import Run

_ADVICE = 'start the same command, with the same files, on all hosts'


def agree_on_settings(config: TrainConfig) -> None:
    """Checks that all processes have the same settings, before anything is made of them.

    Raises:
      Disagreement: if they differ, with a table of them.
    """
    if jax.process_count() > 1:
        check_same('comparing the settings', settings_of(config), _ADVICE)


def agree_on_layout(run: Run) -> None:
    """Checks that all processes have the same devices, the same plan and the same MODEL_DIR.

    Raises:
      Disagreement: if they differ, with a table.
    """
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

    Args:
      lowered: the lowered train step.

    Raises:
      Disagreement: if they differ.
    """
    if jax.process_count() > 1:
        text = {'program of the train step': f'hash {digest(lowered.as_text())}'}
        check_same('tracing the train step', text, 'is the code of all hosts the same?')


def settings_of(config: TrainConfig) -> dict[str, str]:
    """The settings of a run by name: those that gin has used, or else the fields of the config."""
    text = operative_text() if 'gin' in sys.modules else ''
    found: dict[str, str] = {}
    name = ''
    for line in text.splitlines():
        if line.startswith((' ', '\t')) and name:  # a value continues
            found[name] += ' ' + line.strip()
        elif ' = ' in line and not line.startswith('#'):
            name, _, value = line.partition(' = ')
            found[name] = value.strip(' \\')
    return found or dict(_fields('TrainConfig', config))


def _fields(name: str, value: Any) -> Any:
    """Yields the path and the text of each simple value in a configuration."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _fields(f'{name}.{field.name}', getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _fields(f'{name}[{key!r}]', one)
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _fields(f'{name}[{i}]', one)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)
    else:
        yield name, type(value).__name__
