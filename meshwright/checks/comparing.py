"""Compares forecasts with golden files, and writes the files that are missing or updated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.checks.files import (
    MISSING,
    NOTE_VARIABLE,
    OnMissing,
    describe_changes,
    file_of,
    must_write,
    note_forecast,
    read_golden,
    section,
    write_golden,
)
from meshwright.checks.golden_file import (
    FORMAT,
    Golden,
    Tolerances,
    compare_golden,
    golden_of,
)
from meshwright.forecasting import forecast
from meshwright.report.forecasts import Forecast
from meshwright.report.plain_values import to_lines, to_plain


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
        forecast(fn, *args, topology=machine, num_slices=slices, **{'confirm': False, **settings})
        for machine, slices in machines
    ]
    check_golden(
        made, golden, name=name, tolerances=tolerances, update=update, on_missing=on_missing
    )


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

    It compares the layout of every argument, the exchanges by kind and mesh axes, and the peak
    memory. Files of another version of the compiler are compared, too, and the message names both.

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
      AssertionError: if a forecast differs, with one line for each difference, or if a golden file
        is missing and must not be written.
      ValueError: if a golden file is malformed, or if two forecasts share one.
    """
    __tracebackhide__ = True
    files = _files(forecasts, Path(golden), name)
    if folder := os.environ.get(NOTE_VARIABLE):
        for file, made in files.items():
            note_forecast(folder, file, made.as_dict())
        return ()
    written, differences = [], []
    for file, made in files.items():
        now = golden_of(made)
        if must_write(file, update, on_missing):
            write_golden(file, to_lines({'format': FORMAT, **to_plain(now)}))
            written.append(file)
        elif not file.exists():
            differences.append(_section(made, file, [MISSING]))
        elif lines := compare_golden(before := read_golden(file, Golden, FORMAT), now, tolerances):
            if before.compiler != now.compiler:
                versions = f'{before.compiler} -> {now.compiler}'
                lines.insert(0, f'compiler: {versions}, which may be the reason')
            differences.append(_section(made, file, lines))
    if differences:
        raise AssertionError(describe_changes('forecast', len(files), differences))
    return tuple(written)


def golden_path(
    forecast: Forecast, folder: str | os.PathLike[str], name: str | None = None
) -> Path:
    """The golden file of a forecast: `forecasts/train_step.v5e-16x16.2-slices.json`."""
    return file_of(folder, name or forecast.function, forecast.topology, forecast.num_slices)


def _files(forecasts: Sequence[Forecast], folder: Path, name: str | None) -> dict[Path, Forecast]:
    files: dict[Path, Forecast] = {}
    for made in forecasts:
        file = golden_path(made, folder, name)
        if file in files:
            raise ValueError(
                f'two forecasts of {made.function} on {made.topology} would share {file}: compare '
                'them in separate calls, each with its own name'
            )
        files[file] = made
    return files


def _section(made: Forecast, file: Path, lines: Sequence[str]) -> str:
    slices = f', {made.num_slices} slices' if made.num_slices > 1 else ''
    return section(made.function, f'{made.topology}{slices}', file, lines)
