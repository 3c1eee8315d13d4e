"""The watchdog of a run: it ends a process that makes no progress, and leaves its stacks.

A process can wait forever: for another process that is alive but stuck, for storage that does not
answer, or for one of its own locks. Schedulers do not notice, and the machines stay occupied. The
watchdog is a thread that looks at what the run does. It cannot act while native code holds the
interpreter's lock; compilers, collectives and file systems release the lock.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import jax

from partitioning.untrusted_text import printable
from train.errors import check_seconds
from train.paths import is_remote
from train.processes.activity import Activity
from train.processes.output import error_fd, print_error
from train.processes.signals import RESTARTABLE

# Without a limit for steps, a step may take this many times as long as the slowest one so far,
# and at least so many seconds.
TIMES_THE_SLOWEST, LEAST_SECONDS = 5.0, 600.0
# The longest time in which the stacks are written: the storage may be what the run waits for.
SECONDS_TO_WRITE = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How long a run may make no progress before it is ended with exit code 75.

    Attributes:
      step_seconds: the limit for a step of the training loop. By default, it is five times the
        slowest step so far and at least 600 s, and `phase_seconds` until the first metrics are
        logged.
      phase_seconds: the limit for everything else, such as compiling, an evaluation or a save,
        since its last sign of progress.
    """

    step_seconds: float | None = None
    phase_seconds: float = 7200.0

    def __post_init__(self) -> None:
        given = {f'WatchdogConfig.{name}': value for name, value in vars(self).items()}
        if self.step_seconds is None:
            del given['WatchdogConfig.step_seconds']
        check_seconds(**given)


class Watchdog:
    """A thread that ends the process when its run makes no progress.

    Usage:
      with Watchdog(config.watchdog, console.activity, config.model_dir, log_every=10):
        ...

    Args:
      settings: the limits, or None to watch nothing.
      model_dir: the folder of the run, where the stacks are written if it is on a local path.
      log_every: after how many steps the training loop waits for the devices for the first time.
    """

    def __init__(
        self,
        settings: WatchdogConfig | None,
        activity: Activity,
        model_dir: str | os.PathLike[str],
        *,
        log_every: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings, self._activity, self._clock = settings, activity, clock
        self._model_dir, self._log_every = model_dir, log_every
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._stop = threading.Event()
        # What the last check has seen, and its time.
        self._signs, self._in_step, self._quiet = -1, False, 0.0
        self._slowest, self._checked = 0.0, clock()
        limits = [settings.step_seconds, settings.phase_seconds] if settings else []
        # Twice in the shortest limit, and not more often than once a second in any real one.
        self._interval = min([1.0, *(limit / 2 for limit in limits if limit)])

    def __enter__(self) -> Watchdog:
        if self._settings is not None:
            threading.Thread(target=self._watch, name='watchdog', daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            if message := self.check():
                end_process(message, self._model_dir, self._process)

    def check(self) -> str | None:
        """Compares the time without progress with the limit. Returns why the run ends, or None."""
        now = self._clock()
        # A process that was stopped and continues has not been stuck in the meantime.
        passed, self._checked = min(now - self._checked, 2 * self._interval), now
        signs, in_step = self._activity.signs, self._activity.in_step
        if signs != self._signs:
            if self._in_step:
                self._slowest = max(self._slowest, self._quiet)
            self._signs, self._in_step, self._quiet = signs, in_step, 0.0
            return None
        self._quiet += passed
        name, limit = self._limit(in_step)
        if self._quiet < limit:
            return None
        of = f' of process {self._process}' if self._processes > 1 else ''
        return (
            f'stuck: {self._activity.title}{of} has made no progress for {self._quiet:,.0f} s, and '
            f'{name} allows {limit:,.0f} s: raise it if this is normal'
        )

    def _limit(self, in_step: bool) -> tuple[str, float]:
        """The name of the limit that applies, and its seconds."""
        assert self._settings is not None
        seconds = self._settings.step_seconds
        if not in_step or (seconds is None and self._activity.steps <= self._log_every):
            return 'WatchdogConfig.phase_seconds', self._settings.phase_seconds
        if seconds is None:
            seconds = max(TIMES_THE_SLOWEST * self._slowest, LEAST_SECONDS)
        return 'WatchdogConfig.step_seconds', seconds


def end_process(message: str, model_dir: str | os.PathLike[str], process: int) -> None:
    """Prints a message, writes the stacks of all threads, and ends the process with RESTARTABLE.

    The stacks are in the folder of the run, if that is on a local path.
    """
    # Printing and writing may wait forever for what the run waits for, so another thread does it.
    report = threading.Thread(target=_report, args=(message, model_dir, process), daemon=True)
    report.start()
    report.join(SECONDS_TO_WRITE)
    os._exit(RESTARTABLE)


def _report(message: str, model_dir: str | os.PathLike[str], process: int) -> None:
    folder = Path() if is_remote(model_dir) else Path(model_dir).expanduser()
    path, where = folder / f'stacks-of-process-{process}.txt', ''
    if is_remote(model_dir) or not folder.is_dir():
        # Anyone can write there, so the name of the folder is not known before.
        path = Path(tempfile.mkdtemp(prefix='meshwright-')) / path.name
    print_error(printable(message))
    try:
        with path.open('a') as file:
            file.write(f'{time.strftime("%Y-%m-%d %H:%M:%S")} {message}\n')
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        where = f'the stacks of all threads are in {path}; '
    except OSError:
        faulthandler.dump_traceback(error_fd(), all_threads=True)
    print_error(f'{where}exit code {RESTARTABLE}, so that a scheduler can start the run again')
