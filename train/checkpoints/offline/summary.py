"""What is in a checkpoint, from its metadata alone: no array is read."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from etils import epath

from partitioning.state import Role
from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.config import AVERAGES
from train.checkpoints.formats.opening import (
    Checkpoint,
    Place,
    examine_place,
    find_place,
    other_content,
)
from train.checkpoints.steps.manifest import find_files, if_intact
from train.checkpoints.steps.record import read_record
from train.checkpoints.steps.verifying import FoundStep
from train.errors import ConfigError

_OPTIMIZER = ('opt_state/', 'state/param_states/', AVERAGES)
_OTHER = ('step', 'state/step', 'flax_mutables/')
ROLES: tuple[Role, ...] = ('parameters', 'optimizer', 'other')


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What is known about a step of a run without opening its arrays. Sizes are in bytes.

    `format` is '' if it has no arrays, and `status` is as in `FoundStep`. The evaluations that a
    signal has interrupted are pending.
    """

    path: str
    format: str
    step: int | None
    status: str
    reason: str
    num_files: int
    bytes_on_disk: int
    pending: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary(StepSummary):
    """What is in one checkpoint, in addition to what is known about its step.

    Attributes:
      bytes_by_role, bytes_by_dtype: the sizes of its arrays in memory.
      versions: the versions of the packages that wrote it, as far as it says them.
      arrays: its arrays in groups, or each of those that were asked for.
    """

    num_arrays: int
    num_parameters: int
    bytes_by_role: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    versions: Mapping[str, str]
    other_content: Sequence[str]
    arrays: Sequence[ArrayGroup]


def summarize(checkpoint: Checkpoint, pattern: str | None = None) -> Summary:
    """Summarizes one checkpoint, with its arrays in groups, or each that contains a pattern.

    Raises a ConfigError if the regular expression is not valid, or no name contains it.
    """
    place, arrays = checkpoint.place, checkpoint.arrays
    record = if_intact(read_record, place.path)
    by_role, by_dtype = Counter[str](dict.fromkeys(ROLES, 0)), Counter[str]()
    for name, array in arrays.items():
        by_role[role_of(name)] += array.nbytes
        by_dtype[str(array.dtype)] += array.nbytes
    parameters = (x.size for name, x in arrays.items() if role_of(name) == 'parameters')
    known = summarize_step(examine_place(place), place)
    return Summary(
        **dataclasses.asdict(known) | {'step': checkpoint.step()},
        num_arrays=len(arrays),
        num_parameters=sum(parameters),
        bytes_by_role=dict(by_role),
        bytes_by_dtype=dict(by_dtype.most_common()),
        versions=dict(record.versions) if record else {},
        other_content=other_content(place),
        arrays=group_arrays(arrays) if pattern is None else _list_arrays(arrays, pattern),
    )


def _list_arrays(arrays: Mapping[str, StoredArray], pattern: str) -> list[ArrayGroup]:
    """Each array whose name contains a pattern."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f'--arrays={pattern!r} is not a regular expression: {error}') from error
    names = [name for name in arrays if compiled.search(name)]
    if not names:
        first = next(iter(arrays), None)
        raise ConfigError(
            f'--arrays={pattern!r}: none of {len(arrays):,} names contains it; the first is '
            f'{first!r}'
        )
    return [group for name in names for group in group_arrays({name: arrays[name]})]


def summarize_step(found: FoundStep, place: Place | None = None) -> StepSummary:
    """Summarizes a step of a run. Its arrays are looked for, unless their place is known."""
    place, path = place or find_place(found.path), found.path
    record = if_intact(read_record, path)
    sizes = find_files(path) if path.is_dir() else {path.name: path.stat().length}
    # The other statuses say themselves what is wrong.
    reason = shorten_reason(path, found.reason) if found.status == 'damaged' else ''
    return StepSummary(
        path=str(path),
        format=place.format if place else '',
        step=found.step,
        status=found.status,
        reason=reason,
        num_files=len(sizes),
        bytes_on_disk=sum(sizes.values()),
        pending=list(record.pending) if record else [],
    )


def shorten_reason(path: epath.Path, reason: str) -> str:
    """A message on a checkpoint without the path of the checkpoint."""
    return reason.removeprefix(f'checkpoint {path} ').removeprefix('is damaged: ')


# Arrays in groups, so that a model of many layers fits on a screen.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayGroup:
    """Arrays whose names differ only in numbers, and which have the same shape and dtype.

    The arrays of an optimizer are in one group for each thing that it keeps of all parameters.
    `nbytes` is the size of all of them, and `shape` the shape of each, or None if they differ.
    Numbers in the name are ranges, as in 'params/layers_[0-11]/mlp/wi/kernel', and '*' stands for
    the name of a parameter, as in 'opt_state/0/mu/*'.
    """

    name: str
    count: int
    shape: tuple[int, ...] | None
    dtype: str
    nbytes: int
    role: Role


def role_of(name: str) -> Role:
    """The role of an array by its name in a checkpoint of any format.

    Weights in other formats have any names, so what is neither of an optimizer nor a step is a
    parameter.
    """
    if name.startswith(_OPTIMIZER):
        return 'optimizer'
    return 'other' if name.startswith(_OTHER) else 'parameters'


def group_arrays(arrays: Mapping[str, StoredArray]) -> list[ArrayGroup]:
    """Groups arrays: parameters first, then arrays of the optimizer, each in their order."""
    groups = dict[tuple[Any, ...], list[str]]()
    parameters = {name.partition('/')[2] for name in arrays if role_of(name) == 'parameters'}
    for name, array in arrays.items():
        role = role_of(name)
        kept = _replace_parameter(name, parameters) if role == 'optimizer' else name
        pattern = re.sub(r'\d+', '#', name) if kept == name else kept
        shape = tuple(array.shape) if kept == name else None
        groups.setdefault((pattern, shape, str(array.dtype), role), []).append(name)
    found = [
        ArrayGroup(
            name=_with_ranges(names) if '*' not in pattern else pattern,
            count=len(names),
            shape=shape,
            dtype=dtype,
            nbytes=sum(arrays[name].nbytes for name in names),
            role=role,
        )
        for (pattern, shape, dtype, role), names in groups.items()
    ]
    return sorted(found, key=lambda group: ROLES.index(group.role))


def _replace_parameter(name: str, parameters: Collection[str]) -> str:
    """The name with '*' in place of the longest name of a parameter in it."""
    keys = name.split('/')
    for length in range(len(keys) - 1, 0, -1):
        for start in range(1, len(keys) - length + 1):
            if '/'.join(keys[start : start + length]) in parameters:
                return '/'.join([*keys[:start], '*', *keys[start + length :]])
    return name


def _with_ranges(names: Sequence[str]) -> str:
    """The name that stands for names which differ only in numbers."""
    columns = zip(*(re.split(r'(\d+)', name) for name in names), strict=True)
    return ''.join(_range({*column}) for column in columns)


def _range(texts: Collection[str]) -> str:
    """One text as it is, and several numbers as a range."""
    if len(texts) == 1:
        return next(iter(texts))
    shown = sorted(texts, key=int)
    if int(shown[-1]) - int(shown[0]) == len(shown) - 1:
        return f'[{shown[0]}-{shown[-1]}]'
    shown = shown if len(shown) <= 4 else [*shown[:3], '...', shown[-1]]
    return f'[{",".join(shown)}]'
