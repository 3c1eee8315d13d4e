"""What is in a checkpoint, from its metadata alone: no array is read."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from etils import epath

from train.checkpoints.formats.opening import Checkpoint, examine_place, find_place, other_content
from train.checkpoints.offline.grouping import (
    ROLES,
    ArrayGroup,
    bytes_of,
    describe_array,
    group_arrays,
    role_of,
)
from train.checkpoints.steps.manifest import DamagedCheckpoint, find_files
from train.checkpoints.steps.record import StepRecord, read_record
from train.checkpoints.steps.verifying import FoundStep
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What is in one checkpoint. Sizes are in bytes.

    Attributes:
      path: its folder or file.
      format: its format.
      step: its step, or None if nothing says it.
      status: 'good' or another status of `FoundStep`.
      reason: why it is not good.
      num_files: the number of its files.
      bytes_on_disk: their size.
      num_arrays: the number of all arrays.
      num_parameters: the number of elements of all parameters.
      bytes_by_role: the size of the arrays of each role in memory.
      bytes_by_dtype: the size of the arrays of each dtype in memory.
      versions: the versions of the packages that wrote it, as far as it says them.
      other_content: its files and folders next to the arrays.
      pending: the names of evaluations of this step that a signal has interrupted.
      arrays: its arrays in groups, or each of those that were asked for.
    """

    path: str
    format: str
    step: int | None
    status: str
    reason: str
    num_files: int
    bytes_on_disk: int
    num_arrays: int
    num_parameters: int
    bytes_by_role: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    versions: Mapping[str, str]
    other_content: Sequence[str]
    pending: Sequence[str]
    arrays: Sequence[ArrayGroup]


def summarize(checkpoint: Checkpoint, pattern: str | None = None) -> Summary:
    """Summarizes one checkpoint.

    Args:
      checkpoint: the checkpoint.
      pattern: a regular expression; each array whose name contains it is listed. By default, all
        arrays are listed in groups.

    Raises:
      ConfigError: if the pattern is not valid, or no name contains it.
    """
    place, arrays = checkpoint.place, checkpoint.arrays
    found, record = examine_place(place), _read_record(checkpoint)
    num_files, bytes_on_disk = _measure(place.path)
    by_role, by_dtype = Counter[str](dict.fromkeys(ROLES, 0)), Counter[str]()
    for name, array in arrays.items():
        by_role[role_of(name)] += bytes_of(array)
        by_dtype[str(array.dtype)] += bytes_of(array)
    parameters = (x.size for name, x in arrays.items() if role_of(name) == 'parameters')
    return Summary(
        path=str(place.path),
        format=place.format,
        step=checkpoint.step(),
        status=found.status,
        reason=shorten(found),
        num_files=num_files,
        bytes_on_disk=bytes_on_disk,
        num_arrays=len(arrays),
        num_parameters=sum(parameters),
        bytes_by_role=dict(by_role),
        bytes_by_dtype=dict(by_dtype.most_common()),
        versions=dict(record.versions) if record else {},
        other_content=other_content(place),
        pending=list(record.pending) if record else [],
        arrays=group_arrays(arrays) if pattern is None else _list_arrays(checkpoint, pattern),
    )


def _list_arrays(checkpoint: Checkpoint, pattern: str) -> list[ArrayGroup]:
    """Each array whose name contains a pattern."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f'--arrays={pattern!r} is not a regular expression: {error}') from error
    names = [name for name in checkpoint.arrays if compiled.search(name)]
    if not names:
        first = next(iter(checkpoint.arrays), None)
        raise ConfigError(
            f'--arrays={pattern!r}: none of {len(checkpoint.arrays):,} names contains it; the '
            f'first is {first!r}'
        )
    return [describe_array(name, checkpoint.arrays[name]) for name in names]


def shorten(found: FoundStep) -> str:
    """What is damaged, without the path of the step. The other statuses say it themselves."""
    return shorten_reason(found.path, found.reason) if found.status == 'damaged' else ''


def shorten_reason(path: epath.Path, reason: str) -> str:
    """A message on a checkpoint without the path of the checkpoint."""
    return reason.removeprefix(f'checkpoint {path} ').removeprefix('is damaged: ')


def _read_record(checkpoint: Checkpoint) -> StepRecord | None:
    try:
        return read_record(checkpoint.place.path)
    except DamagedCheckpoint:
        return None  # The status says it.


def _measure(path: epath.Path) -> tuple[int, int]:
    """The number of files and their size in bytes."""
    if not path.is_dir():
        return 1, path.stat().length
    sizes = find_files(path)
    return len(sizes), sum(sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What is known about a step of a run without opening its arrays.

    Attributes:
      step: the step in the name of its folder.
      path: the folder.
      format: its format, or '' if it has no arrays.
      status: see `FoundStep`.
      reason: why it is not good.
      num_files: the number of its files.
      bytes_on_disk: their size.
      pending: the names of evaluations of this step that a signal has interrupted.
    """

    step: int
    path: str
    format: str
    status: str
    reason: str
    num_files: int
    bytes_on_disk: int
    pending: Sequence[str]


def summarize_step(found: FoundStep) -> StepSummary:
    """Summarizes a step of a run."""
    place = find_place(found.path)
    try:
        record = read_record(found.path)
    except DamagedCheckpoint:
        record = None
    num_files, bytes_on_disk = _measure(found.path)
    return StepSummary(
        step=found.step,
        path=str(found.path),
        format=place.format if place else '',
        status=found.status,
        reason=shorten(found),
        num_files=num_files,
        bytes_on_disk=bytes_on_disk,
        pending=list(record.pending) if record else [],
    )
