"""Where metrics go: JSON lines, TensorBoard and Weights & Biases, behind one small interface."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

import jax
from etils import epath

from partitioning.untrusted_text import parse_json
from train.errors import ConfigError, FailurePolicy, describe_error, import_optional
from train.paths import is_remote
from train.processes.together import raise_on_all_processes
from train.reporting.metric_files import AppendedFile, EventFile


class MetricWriter(Protocol):
    """Writes the metrics of steps. It is created as `Writer(directory, resumed_step)`.

    When a run resumes, it writes the records after `resumed_step` again, so earlier ones are
    dropped or replaced. Optional attributes are `path`, where the metrics are, and `num_dropped`.
    An optional method `forget(step, names)`, which is called before the first record, drops what
    these evaluators have written at a step.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one record of a step. A step may have several."""

    def close(self) -> None:
        """Completes what has been written."""


class Writers:
    """Several metric writers as one. On all processes except 0, there are none.

    Args:
      on_failure: 'stop' raises an error if a writer fails. 'continue' says so, once until the
        writer works again.
    """

    def __init__(
        self,
        writers: Sequence[MetricWriter],
        on_failure: FailurePolicy = 'stop',
        say: Callable[[str], None] = print,
    ):
        self._writers, self._on_failure, self._say = writers, on_failure, say
        self._failing: set[int] = set()

    @property
    def paths(self) -> dict[str, epath.Path]:
        """Where the metrics are, by the name of the writer."""
        return {type(w).__name__: w.path for w in self._writers if hasattr(w, 'path')}

    @property
    def num_dropped(self) -> int:
        """The number of earlier records that were dropped, because their steps come again."""
        return sum(getattr(writer, 'num_dropped', 0) for writer in self._writers)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one record of a step. All processes must call it together.

        Raises an OSError if a writer fails and the policy is to stop.
        """
        self._call('written', lambda writer: writer.write(step, scalars))

    def forget(self, step: int, names: Collection[str]) -> None:
        """Drops the records of evaluators at a step, which are about to be written again.

        Raises an OSError as `write`.
        """

        def drop(writer: Any) -> None:
            if hasattr(writer, 'forget'):
                writer.forget(step, names)

        self._call('rewritten', drop)

    def close(self) -> None:
        """Closes every writer, even if one fails.

        Raises an OSError if a writer fails and the policy is to stop.
        """
        self._call('completed', lambda writer: writer.close(), together=False)

    def _call(
        self, done: str, method: Callable[[MetricWriter], None], *, together: bool = True
    ) -> None:
        """Calls a method of every writer, and raises the first new error if the policy says so.

        `together` says whether all processes call it, so that all of them raise the error.
        """
        first: OSError | None = None
        for i, writer in enumerate(self._writers):
            name = type(writer).__name__
            try:
                method(writer)
            except Exception as error:  # The users' own writers raise any type.
                line = f'the metrics of {name} cannot be {done}: {describe_error(error)}'
                if i in self._failing:  # It has been said.
                    continue
                self._failing.add(i)
                first = first or OSError(line)
                if self._on_failure == 'continue':
                    self._say(f'{line}; the run continues without them')
            else:
                if i in self._failing:
                    self._say(f'the metrics of {name} can be {done} again')
                self._failing.discard(i)
        if self._on_failure == 'stop':
            with raise_on_all_processes() if together else contextlib.nullcontext():
                if first is not None:
                    raise first


def open_writers(
    writers: Sequence[Callable[[epath.Path, int], MetricWriter]],
    directory: epath.Path,
    resumed_step: int,
    on_failure: FailurePolicy = 'stop',
    say: Callable[[str], None] = print,
) -> Writers:
    """Creates the metric writers of a run on process 0, and none on other processes.

    `writers` are classes of writers, or functions that create one. Raises a ConfigError if one
    cannot be created, whatever the policy: nothing has been trained yet.
    """
    opened = list[MetricWriter]()
    for create in writers if jax.process_index() == 0 else ():
        try:
            opened.append(create(directory, resumed_step))
        except OSError as error:
            name = getattr(create, '__name__', type(create).__name__)
            raise ConfigError(
                f'the metrics of {name} cannot be opened: {describe_error(error)}'
            ) from error
    return Writers(opened, on_failure, say)


class JsonWriter:
    """Writes `{"step": step, "train/loss": ..., ...}` as lines of `<directory>/metrics.jsonl`.

    Numbers that JSON lacks become null. Records after the resumed step are dropped, and so is a
    line that a killed run left incomplete. For when records are on disk, see `AppendedFile`.

    Args:
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.

    Attributes:
      path: the file.
      num_dropped: the number of records that were dropped.

    Raises:
      OSError: if the file cannot be read, or records cannot be dropped.
    """

    def __init__(self, directory: epath.Path, resumed_step: int):
        self.path = epath.Path(directory) / 'metrics.jsonl'
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        self._lines = [line for line in lines if is_record(line, resumed_step)]
        self.num_dropped = len(lines) - len(self._lines)
        self._file = AppendedFile(self.path)
        if self.num_dropped:
            self._file.replace(b''.join(self._lines))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.append((json.dumps({'step': step, **values}) + '\n').encode())

    def forget(self, step: int, names: Collection[str]) -> None:
        prefixes, kept = tuple(f'{name}/' for name in names), []
        for line in self._lines:
            record = json.loads(line)
            if record['step'] != step or not any(key.startswith(prefixes) for key in record):
                kept.append(line)
        if len(kept) < len(self._lines):
            self._file.replace(b''.join(kept))
            self._lines = kept

    def close(self) -> None:
        self._file.close()


def is_record(line: bytes, last_step: int) -> bool:
    """Whether a line is a complete record of `last_step` or an earlier step."""
    try:
        return line.endswith(b'\n') and parse_json(line)['step'] <= last_step
    except (ValueError, TypeError, KeyError):
        return False


# What is not a curve: the time left, and the times of the start, which are one point each.
_NOT_CURVES = ('train/seconds_left', 'start/')


class TensorBoardWriter:
    """Writes event files for TensorBoard to `<directory>/tensorboard/`.

    They have no times of the start of the run and no time left, which `JsonWriter` writes.

    TensorBoard itself hides the records after the resumed step, because a new event file says so.

    Args:
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.

    Attributes:
      path: the folder of the event files.

    Raises:
      OSError: if the folder cannot be created.
    """

    def __init__(self, directory: epath.Path, resumed_step: int):
        self.path = epath.Path(directory) / 'tensorboard'
        self._resumed_step = resumed_step
        self.path.mkdir(parents=True, exist_ok=True)

    @functools.cached_property
    def _events(self) -> EventFile:
        # At the first record, because importing the package can take most of a second.
        return EventFile(self.path, 'TensorBoardWriter', purge_step=self._resumed_step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        shown = [(name, x) for name, x in scalars.items() if not name.startswith(_NOT_CURVES)]
        if shown:
            self._events.write_scalars(step, shown)

    def close(self) -> None:
        if '_events' in self.__dict__:
            self._events.close()


class WeightsAndBiasesSettings(TypedDict, total=False):
    """Arguments of `wandb.init` that gin files may set.

    Others send an account's key to another server, or upload files. A program may pass them, too.
    """

    project: str
    entity: str
    name: str
    notes: str
    group: str
    job_type: str
    tags: Sequence[str]
    mode: str


class WeightsAndBiasesWriter:
    """Logs to Weights & Biases. Needs the package wandb.

    A run that resumes continues its run there: the id is kept in `<directory>/wandb-id.txt`.
    Weights & Biases ignores the records of steps that it already has.

    Args:
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.
      **settings: arguments of `wandb.init`, such as `project` and `name`.
    """

    def __init__(
        self,
        directory: epath.Path,
        resumed_step: int,
        **settings: Unpack[WeightsAndBiasesSettings],
    ):
        wandb = import_optional('wandb', 'wandb', 'WeightsAndBiasesWriter')
        file = epath.Path(directory) / 'wandb-id.txt'
        known = file.read_text() if resumed_step and file.exists() else None
        local = {} if is_remote(directory) else {'dir': str(directory)}
        self._run = wandb.init(**{'id': known, 'resume': 'allow', **local, **settings})
        file.write_text(self._run.id)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
