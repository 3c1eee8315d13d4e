"""Golden layouts: files with the layout of every argument and result of a function."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.auditing import audit
from meshwright.checks.files import (
    MISSING,
    OnMissing,
    describe_changes,
    file_of,
    must_write,
    read_golden,
    section,
    write_golden,
)
from meshwright.checks.golden_file import GoldenArray, compare_arrays
from meshwright.report.call_audit import AuditedArray
from meshwright.report.plain_values import to_lines, to_plain
from partitioning.rules import describe_axes

FORMAT = 'meshwright golden layout 1'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenLayout:
    """What a golden layout has of a function on a machine."""

    function: str
    topology: str
    num_slices: int
    mesh: Mapping[str, int]
    arguments: tuple[GoldenArray, ...]
    results: tuple[GoldenArray, ...]


def assert_layout_unchanged(
    fn: Any,
    args: Sequence[Any],
    *,
    topology: str | None = None,
    num_slices: int = 1,
    golden: str | os.PathLike[str] = 'layouts',
    name: str | None = None,
    update: bool | None = None,
    on_missing: OnMissing | None = None,
    **settings: Any,
) -> None:
    """Asserts that every argument and result of a function is laid out as its golden file says.

    Usage:
      def test_the_state_stays_where_it_is():
          assert_layout_unchanged(step, (state, batch), topology='v5p:4x4x4')

    The layouts of results are the compiler's, for the machine. Its version and the memory do not
    count.

    Args:
      fn: the function, as for `forecast`.
      args: the arguments of a call; abstract ones suffice.
      topology: the machine; by default, the machine of the arguments.
      num_slices: the number of its slices.
      golden: the folder of the golden files.
      name: the beginning of the name of the file, by default the name of the function.
      update, on_missing: as in `check_golden`.
      **settings: more arguments of `audit`, such as on_cpu=True. With compile=False, only results
        whose layout the function states are compared.

    Raises:
      AssertionError: if a layout differs, with a line for each array, or if the golden file is
        missing and must not be written.
      ValueError: if the golden file is malformed, or as in `forecast`.
    """
    __tracebackhide__ = True
    made = audit(fn, *args, topology=topology, num_slices=num_slices, **settings)
    now = GoldenLayout(
        function=made.function,
        topology=made.machine,
        num_slices=num_slices,
        mesh=made.mesh,
        arguments=tuple(map(_golden_array, made.arguments)),
        results=tuple(map(_golden_array, made.results)),
    )
    file = file_of(golden, name or now.function, now.topology, num_slices)
    _compare(now, file, update, on_missing)


def _golden_array(row: AuditedArray) -> GoldenArray:
    return GoldenArray(
        path=row.path,
        shape=row.shape,
        dtype=row.dtype,
        spec=row.spec,
        bytes_per_device=row.bytes_per_device,
    )


def _compare(
    now: GoldenLayout, file: Path, update: bool | None, on_missing: OnMissing | None
) -> None:
    """Writes a golden file, or compares with it."""
    __tracebackhide__ = True
    if must_write(file, update, on_missing):
        write_golden(file, to_lines({'format': FORMAT, **to_plain(now)}))
        return
    lines = [MISSING]
    if file.exists():
        before = read_golden(file, GoldenLayout, FORMAT)
        lines = []
        if before.mesh != now.mesh:
            lines.append(f'mesh: {describe_axes(before.mesh)} -> {describe_axes(now.mesh)}')
        lines += compare_arrays(before.arguments, now.arguments)
        lines += compare_arrays(before.results, now.results)
    if lines:
        found = section(now.function, now.topology, file, lines)
        raise AssertionError(describe_changes('layout', 1, [found]))
