"""Compares programs with their golden records, and writes those that are missing or updated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.auditing import audit
from meshwright.records.difference import Tolerances
from meshwright.records.files import (
    HOW_TO_UPDATE,
    NOTE_VARIABLE,
    OnMissing,
    file_of,
    must_write,
    note_record,
    read_golden,
    write_golden,
)
from meshwright.records.record import Record
from meshwright.records.recording import record_call, record_forecast, record_layouts
from meshwright.records.verdict_text import verdict_lines
from meshwright.records.verdicts import Recorded, judge
from meshwright.report.forecasts import Forecast
from partitioning.tracebacks import hide_own_frames

_WIDTH = 100  # of the message of a test that failed


@hide_own_frames
def assert_forecast_unchanged(
    fn: Any,
    args: Sequence[Any],
    *,
    topologies: Sequence[str | tuple[str, int]] | None = None,
    topology: str | None = None,
    golden: str | os.PathLike[str] = 'forecasts',
    name: str | None = None,
    tolerances: Tolerances = Tolerances(),  # noqa: B008  (it is frozen)
    update: bool | None = None,
    on_missing: OnMissing | None = None,
    **settings: Any,
) -> None:
    """Asserts that the forecasts of a function equal its golden files.

    Usage:
      def test_the_step_on_a_pod():
          assert_forecast_unchanged(step, (state, batch), topologies=['v5p:4x4x4'])

    Args:
      fn: the function, as for `forecast`.
      args: the arguments of a call; abstract ones suffice.
      topologies: the machines: 'v5p:4x4x4', or ('v5e:16x16', 2) for two slices. By default, the
        machine of the arguments.
      topology: a single machine, in place of `topologies`.
      golden, name, tolerances, update, on_missing: as in `check_golden`.
      **settings: more arguments of `forecast`, such as compile=False.

    Raises:
      AssertionError: if a forecast differs, or if a golden file is missing, as in `check_golden`.
      ValueError: if a golden file is malformed, if two forecasts share one, or as in `forecast`.
    """
    __tracebackhide__ = True
    if topology is not None and topologies is not None:
        raise ValueError('topology and topologies name the machines twice: leave out one of them')
    if isinstance(topologies, str):
        raise ValueError(f'topologies is a text: write topologies=[{topologies!r}]')
    named = [topology] if topologies is None else topologies
    machines = [one if isinstance(one, tuple) else (one, 1) for one in named]
    made = [
        record_call(fn, args, topology=machine, num_slices=slices, **settings)
        for machine, slices in machines
    ]
    _compare(made, golden, name, tolerances, update, on_missing)


@hide_own_frames
def golden(
    fn: Any,
    *args: Any,
    topology: str | tuple[str, int] | Sequence[str | tuple[str, int]] | None = None,
    folder: str | os.PathLike[str] = 'forecasts',
    name: str | None = None,
    tolerances: Tolerances = Tolerances(),  # noqa: B008  (it is frozen)
    update: bool | None = None,
    on_missing: OnMissing | None = None,
    **settings: Any,
) -> None:
    """Asserts that the forecasts of a call equal its golden files, which the first call writes.

    Usage:
      def test_the_step_on_a_pod():
          mw.golden(train_step, state, batch, topology='v5p:4x4x4')

    Args:
      fn, *args: a function and the arguments of a call, as for `forecast`.
      topology: a machine, several, or None for the machine of the arguments. ('v5e:16x16', 2) has
        two slices.
      folder: the folder of the golden files.
      name, tolerances, update, on_missing: as in `check_golden`.
      **settings: more arguments of `forecast`, such as axes or compile=False.

    Raises:
      AssertionError: if a forecast differs, or if a golden file is missing, as in `check_golden`.
      ValueError: as in `assert_forecast_unchanged`.
    """
    given: Any = topology
    is_one = given is None or isinstance(given, str)
    is_one = is_one or (len(given) == 2 and isinstance(given[1], int))
    assert_forecast_unchanged(
        fn,
        args,
        topologies=[given] if is_one else given,
        golden=folder,
        name=name,
        tolerances=tolerances,
        update=update,
        on_missing=on_missing,
        **settings,
    )


@hide_own_frames
def check_golden(
    forecasts: Sequence[Forecast],
    golden: str | os.PathLike[str] = 'forecasts',
    *,
    name: str | None = None,
    tolerances: Tolerances = Tolerances(),  # noqa: B008  (it is frozen)
    update: bool | None = None,
    on_missing: OnMissing | None = None,
) -> tuple[Path, ...]:
    """Checks that forecasts equal their golden files.

    It compares the layout of every argument, the exchanges, the peak and the time. Files of another
    version of the compiler are compared, too, and the message names both.

    Args:
      forecasts: the forecasts.
      golden: the folder of the golden files.
      name: the beginning of the names of the files, by default the name of the function.
      tolerances: how much figures may differ.
      update: whether to replace the golden files in place of comparing with them; by default,
        whether the environment has MESHWRIGHT_UPDATE_FORECASTS=1.
      on_missing: 'write' writes a golden file that is missing, and 'error' fails; by default, it
        fails where the environment has CI set, as continuous integration does.

    Returns:
      The files that were written.

    Raises:
      AssertionError: if a forecast differs, with what changed and which line explains it, or if a
        golden file is missing and must not be written.
      ValueError: if a golden file is malformed, or if two forecasts share one.
    """
    __tracebackhide__ = True
    made = [(record_forecast(one), one) for one in forecasts]
    return _compare(made, golden, name, tolerances, update, on_missing)


@hide_own_frames
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
      AssertionError: if a layout differs, or if the golden file is missing and must not be written.
      ValueError: if the golden file is malformed, or as in `forecast`.
    """
    __tracebackhide__ = True
    made = audit(fn, *args, topology=topology, num_slices=num_slices, **settings)
    now = record_layouts(made, num_slices)
    _compare([(now, None)], golden, name, Tolerances(), update, on_missing)


def golden_path(
    forecast: Forecast, folder: str | os.PathLike[str], name: str | None = None
) -> Path:
    """The golden file of a forecast: `forecasts/train_step.v5e-16x16.2-slices.json`."""
    return file_of(folder, name or forecast.function, forecast.topology, forecast.num_slices)


def _compare(
    records: Sequence[tuple[Record, Forecast | None]],
    folder: str | os.PathLike[str],
    name: str | None,
    tolerances: Tolerances,
    update: bool | None,
    on_missing: OnMissing | None,
) -> tuple[Path, ...]:
    """Compares records with golden files, or writes these; returns those that were written."""
    __tracebackhide__ = True
    written, changed = [], []
    for file, (now, forecast) in _files(records, folder, name).items():
        if forecast is not None and (notes := os.environ.get(NOTE_VARIABLE)):
            note_record(notes, file, now, forecast)
        elif must_write(file, update, on_missing):
            write_golden(file, now.to_json())
            written.append(file)
        else:
            before = read_golden(file, HOW_TO_UPDATE)
            verdict = judge(
                now.function, '', file, Path(), before, Recorded(record=now), tolerances=tolerances
            )
            if verdict.status != 'same':
                changed.append('\n'.join([f'{file}:', *verdict_lines(verdict, _WIDTH)]))
    if changed:
        raise AssertionError(
            f'{len(changed)} of {len(records)} golden file{"s" * (len(records) > 1)} changed. If '
            f'that is intended, {HOW_TO_UPDATE}, and commit the files.\n\n' + '\n\n'.join(changed)
        )
    return tuple(written)


def _files(
    records: Sequence[tuple[Record, Forecast | None]],
    folder: str | os.PathLike[str],
    name: str | None,
) -> dict[Path, tuple[Record, Forecast | None]]:
    """The golden file of each record."""
    files: dict[Path, tuple[Record, Forecast | None]] = {}
    for made, forecast in records:
        file = file_of(folder, name or made.function, made.topology, made.num_slices)
        if file in files:
            raise ValueError(
                f'two forecasts of {made.function} on {made.topology} would share {file}: compare '
                'them in separate calls, each with its own name'
            )
        files[file] = made, forecast
    return files
