"""Where metrics go: JSON lines, TensorBoard and Weights & Biases, behind one small interface."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
from etils import epath

from train.errors import import_optional
from train.paths import is_remote

# An object in a store cannot be appended to, so it is written as a whole, at most this often.
SECONDS_BETWEEN_UPLOADS = 30.0


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


@dataclasses.dataclass(frozen=True)
class Writers:
    """Several metric writers as one. On all processes except 0, there are none.

    Attributes:
      writers: the writers.
    """

    writers: Sequence[MetricWriter]

    @property
    def paths(self) -> dict[str, epath.Path]:
        """Where the metrics are, by the name of the writer."""
        return {type(w).__name__: w.path for w in self.writers if hasattr(w, 'path')}

    @property
    def num_dropped(self) -> int:
        """The number of earlier records that were dropped, because their steps come again."""
        return sum(getattr(writer, 'num_dropped', 0) for writer in self.writers)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one record of a step."""
        for writer in self.writers:
            writer.write(step, scalars)

    def forget(self, step: int, names: Collection[str]) -> None:
        """Drops the records of evaluators at a step, which are about to be written again."""
        for writer in self.writers:
            if hasattr(writer, 'forget'):
                writer.forget(step, names)

    def close(self) -> None:
        """Closes every writer, even if one fails."""
        with contextlib.ExitStack() as stack:
            for writer in self.writers:
                stack.callback(writer.close)


def open_writers(
    writers: Sequence[Callable[[epath.Path, int], MetricWriter]],
    directory: epath.Path,
    resumed_step: int,
) -> Writers:
    """Creates the metric writers of a run on process 0, and none on other processes.

    Args:
      writers: classes of writers, or functions that create one.
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.
    """
    if jax.process_index() > 0:
        return Writers(())
    return Writers([create(directory, resumed_step) for create in writers])


class JsonWriter:
    """Writes `{"step": step, "train/loss": ..., ...}` as lines of `<directory>/metrics.jsonl`.

    Numbers that JSON lacks become null. Records after the resumed step are dropped, and so is a
    line that a killed run left incomplete. A local file has each record at once; one in a store of
    objects is rewritten every SECONDS_BETWEEN_UPLOADS and at the end.

    Args:
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.

    Attributes:
      path: the file.
      num_dropped: the number of records that were dropped.
    """

    def __init__(self, directory: epath.Path, resumed_step: int):
        self.path = epath.Path(directory) / 'metrics.jsonl'
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        self._lines = [line for line in lines if _is_record(line, resumed_step)]
        self.num_dropped = len(lines) - len(self._lines)
        if self.num_dropped:
            self._rewrite()
        self._rewritten = time.monotonic()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        line = json.dumps({'step': step, **values}) + '\n'
        if not is_remote(self.path):
            with self.path.open('a') as file:
                file.write(line)
            return
        self._lines.append(line)
        if time.monotonic() - self._rewritten >= SECONDS_BETWEEN_UPLOADS:
            self._rewrite()
            self._rewritten = time.monotonic()

    def forget(self, step: int, names: Collection[str]) -> None:
        kept = [line for line in self._lines if not _is_of_evaluator(line, step, names)]
        if len(kept) < len(self._lines):
            self._lines = kept
            self._rewrite()

    def close(self) -> None:
        if is_remote(self.path):
            self._rewrite()

    def _rewrite(self) -> None:
        unfinished = self.path.with_suffix('.tmp')
        unfinished.write_text(''.join(self._lines))
        unfinished.replace(self.path)


def _is_record(line: str, last_step: int) -> bool:
    """Whether a line is a complete record of `last_step` or an earlier step."""
    try:
        return line.endswith('\n') and json.loads(line)['step'] <= last_step
    except (ValueError, TypeError, KeyError):
        return False


def _is_of_evaluator(line: str, step: int, names: Collection[str]) -> bool:
    """Whether a line is the record of one of these evaluators at a step."""
    record, prefixes = json.loads(line), tuple(f'{name}/' for name in names)
    return record['step'] == step and any(key.startswith(prefixes) for key in record)


class TensorBoardWriter:
    """Writes event files for TensorBoard to `<directory>/tensorboard/`.

    TensorBoard itself hides the records after the resumed step, because a new event file says so.

    Args:
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.

    Attributes:
      path: the folder of the event files.
    """

    def __init__(self, directory: epath.Path, resumed_step: int):
        self.path = epath.Path(directory) / 'tensorboard'
        self._resumed_step = resumed_step

    @functools.cached_property
    def _events(self) -> Any:
        # At the first record, because importing the package can take most of a second.
        package = import_optional('tensorboardX', 'train', 'TensorBoardWriter')
        return package.SummaryWriter(str(self.path), purge_step=self._resumed_step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        if '_events' in self.__dict__:
            self._events.close()


class WeightsAndBiasesWriter:
    """Logs to Weights & Biases. Needs the package wandb.

    A run that resumes continues its run there: the id is kept in `<directory>/wandb-id.txt`.
    Weights & Biases ignores the records of steps that it already has.

    Args:
      directory: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.
      **settings: arguments of `wandb.init`, such as `project` and `name`.
    """

    def __init__(self, directory: epath.Path, resumed_step: int, **settings: Any):
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
