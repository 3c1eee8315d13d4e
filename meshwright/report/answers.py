"""The JSON that forecast, fits, dry and explain print with `--json`, for other programs.

    {
     "format": "meshwright answers 1",
     "command": "forecast",
     "versions": {"meshwright": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.52"},
     "fits": true,
     "answers": [
      {"function": "train_step", "machine": "v5p:4x4x4", ..., "peak": 8053063680, ...}
     ],
     "details": {}
    }

The number in "format" changes when an entry changes its meaning or disappears, and not when entries
are added. `answers.schema.json` describes all entries but "details", whose entries belong to a
command and may change at any time. Figures are per device and call.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from meshwright.causes import Cause
from meshwright.causes.cause import Effect, source_of
from meshwright.program.collectives import Collective
from meshwright.report.figures import Sent, sum_collectives
from meshwright.report.forecasts import Forecast, ForecastFinding, MemoryChange
from meshwright.report.plain_values import to_plain

FORMAT = 'meshwright answers 1'

Command = Literal['forecast', 'fits', 'dry', 'explain']

# The packages with the compilers for the chips of a platform.
COMPILERS = {'tpu': ('libtpu',), 'gpu': ('jax-cuda13-plugin', 'jax-cuda12-plugin')}
_PACKAGES = ('meshwright', 'jax', 'jaxlib', *COMPILERS['tpu'], *COMPILERS['gpu'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerTime:
    """The time of a call.

    Attributes:
      seconds: the forecast.
      low: the lower end of its range, in seconds.
      high: the upper end.
      mfu: the share of the chip's peak rate that the model's FLOPs make up.
    """

    seconds: float
    low: float
    high: float
    mfu: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerEffect:
    """What a change does to a program, per device and call.

    Attributes:
      sent: the bytes that a device sends with the change.
      sent_before: the bytes without it.
      peak: the peak with the change, in bytes.
      peak_before: the peak without it.
      seconds: the time with the change, or null if the chip has no model.
      seconds_before: the time without it.
    """

    sent: float
    sent_before: float
    peak: int
    peak_before: int
    seconds: float | None
    seconds_before: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerCause:
    """Why an exchange exists.

    Attributes:
      source: the 'file:line' of the user's code, or ''.
      array: the array that is moved.
      why: a sentence that says why.
      change: what to write instead, or ''.
      suspect: whether the layout seems not to need the exchange.
      avoidable: whether a change was found with which a program of the same mathematics does not
        send it.
      confirmed: whether compiling with the change showed that it helps; null if it was not tried.
      effect: what the change does, compiled or by formula; null if that is not known.
    """

    source: str
    array: str
    why: str
    change: str
    suspect: bool
    avoidable: bool
    confirmed: bool | None
    effect: AnswerEffect | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerExchange:
    """An exchange of data.

    Attributes:
      kind: 'all-gather', 'reduce-scatter', ...
      axes: the mesh axes; empty if they are not known.
      network: 'ici' within a slice or host, 'dcn' between slices.
      bytes: the bytes that a device sends.
      count: how often it is executed.
      arrays: the types of the arrays that a device gives.
      source: the 'file:line' of the code, or ''.
      cause: its cause, or null if it is not known.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    bytes: float
    count: int
    arrays: tuple[str, ...]
    source: str
    cause: AnswerCause | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What is known about one program on one machine.

    Attributes:
      function: the name of the function or module.
      machine: the machine, as `--topology` takes it: 'v5p:4x4x4', '2xv5e:16x16'; null if it is not
        known.
      num_devices: the number of devices.
      chip: the chip, or null for others than those that are known.
      mesh: the size of each mesh axis, or null if it is not known.
      compiler: where the figures are from: 'libtpu 0.0.52', 'by formula', ...
      fits: whether the peak is at most the limit; null if one of them is not known.
      peak: the most memory that is in use, in bytes.
      limit: what a program can use, in bytes.
      sent: the exchanges, added up by kind, axes and network.
      exchanges: the exchanges, those with the most bytes first.
      time: the time of a call, or null if the chip has no model.
      changes: what would make it fit, if it does not.
      findings: what is wrong or wasteful in its layouts.
      warnings: what the compiler warned about.
      notes: what is exact and what is not.
      problem: why there are no figures, or ''.
      details: what else the command knows.
    """

    function: str
    machine: str | None
    num_devices: int
    chip: str | None
    mesh: Mapping[str, int] | None
    compiler: str
    fits: bool | None
    peak: int | None
    limit: int | None
    sent: tuple[Sent, ...] = ()
    exchanges: tuple[AnswerExchange, ...] = ()
    time: AnswerTime | None = None
    changes: tuple[MemoryChange, ...] = ()
    findings: tuple[ForecastFinding, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ''
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def answer_of(forecast: Forecast) -> Answer:
    """The answer of a forecast. Its details are what `Forecast.from_json` reads."""
    time, memory = forecast.time, forecast.memory
    slices = f'{forecast.num_slices}x' if forecast.num_slices > 1 else ''
    return Answer(
        function=forecast.function,
        machine=f'{slices}{forecast.topology}',
        num_devices=forecast.num_devices,
        chip=forecast.chip.name if forecast.chip else None,
        mesh=dict(forecast.mesh),
        compiler='by formula' if forecast.back_end == 'none' else forecast.back_end_version,
        fits=forecast.fits,
        peak=memory.peak,
        limit=memory.limit,
        sent=sum_collectives(c for c, _ in forecast.collectives),
        exchanges=tuple(describe_exchange(c, cause) for c, cause in forecast.collectives),
        time=None
        if time is None
        else AnswerTime(seconds=time.seconds, low=time.low, high=time.high, mfu=forecast.mfu),
        changes=forecast.changes,
        findings=forecast.findings,
        warnings=forecast.warnings,
        notes=forecast.notes,
        details=forecast.as_dict(),
    )


def describe_exchange(collective: Collective, cause: Cause | None = None) -> AnswerExchange:
    """An exchange with its cause."""
    return AnswerExchange(
        kind=collective.kind,
        axes=collective.axes,
        network=collective.network,
        bytes=collective.total_bytes,
        count=collective.count,
        arrays=collective.arrays,
        source=source_of(cause, collective.source),
        cause=None if cause is None else _describe_cause(cause),
    )


def _describe_cause(cause: Cause) -> AnswerCause:
    return AnswerCause(
        source=cause.source,
        array=cause.array,
        why=cause.why,
        change=cause.change,
        suspect=cause.suspect,
        avoidable=cause.avoidable,
        confirmed=cause.confirmed,
        effect=None if cause.effect is None else _describe_effect(cause.effect),
    )


def _describe_effect(effect: Effect) -> AnswerEffect:
    (sent_before, sent), (peak_before, peak) = effect.sent, effect.peak
    seconds_before, seconds = effect.seconds or (None, None)
    return AnswerEffect(
        sent=sent,
        sent_before=sent_before,
        peak=peak,
        peak_before=peak_before,
        seconds=seconds,
        seconds_before=seconds_before,
    )


def fit_together(fits: Sequence[bool | None]) -> bool | None:
    """Whether everything fits; None if one is not known and all others fit."""
    if False in fits:
        return False
    return None if None in fits or not fits else True


def write_answers(
    command: Command, answers: Sequence[Answer], details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The document that a command prints with `--json`, as values that JSON can hold.

    Args:
      command: the command.
      answers: its answers.
      details: what the command knows besides.
    """
    return {
        'format': FORMAT,
        'command': command,
        'versions': dict(package_versions()),
        'fits': fit_together([answer.fits for answer in answers]),
        'answers': [to_plain(answer) for answer in answers],
        'details': dict(details or {}),
    }


def answers_json(
    command: Command, answers: Sequence[Answer], details: Mapping[str, Any] | None = None
) -> str:
    """The text of `write_answers`, in one line."""
    return json.dumps(write_answers(command, answers, details))


def exit_status(answers: Sequence[Answer]) -> int:
    """0 if nothing is known not to fit, and else 1. Commands that fail return 2."""
    return int(fit_together([answer.fits for answer in answers]) is False)


@functools.cache
def answer_schema() -> dict[str, Any]:
    """The JSON Schema of what `forecast`, `fits`, `dry` and `explain` print with `--json`."""
    return json.loads(Path(__file__).with_name('answers.schema.json').read_text())


@functools.cache
def package_versions() -> tuple[tuple[str, str], ...]:
    """The versions of this package, of jax and of its compilers, as far as they are installed."""
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)
