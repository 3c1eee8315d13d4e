"""Runs the processes of a run, and decides after a failure whether to start them again."""

from __future__ import annotations

import dataclasses
import select
import signal
import sys
from collections.abc import Callable, Sequence

from train.errors import ConfigError, check_counts
from train.processes.launching.children import reserved_port
from train.processes.launching.endings import (
    Attempt,
    Printer,
    describe_failure,
    find_cause,
    lost_processes,
)
from train.processes.launching.supervision import Child, read_inbox, signal_inbox, supervise
from train.processes.signals import AFTER_CTRL_C, RESTARTABLE, exit_code_after

# So that a run which fails at once does not fill the log.
SECONDS_BEFORE_RESTART = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How many processes run, and what happens when they fail.

    Attributes:
      processes: the number of processes, at least 1.
      devices_per_process: the number of devices of each, at least 1.
      restarts: how often they may be started again.
      min_processes: the fewest processes with which the run may continue after one was lost. By
        default, it continues with as many as before.
      grace_seconds: how long the others may take to end by themselves after a failure.
    """

    processes: int
    devices_per_process: int
    restarts: int = 0
    min_processes: int | None = None
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_counts(0, **{'--restarts': self.restarts})
        if self.min_processes is not None:
            if self.min_processes not in range(1, self.processes + 1):
                raise ConfigError(
                    f'--min_processes={self.min_processes} must be from 1 to {self.processes}, '
                    f'because --processes={self.processes}'
                )
            if self.restarts == 0:
                raise ConfigError('--min_processes needs --restarts=N, with N >= 1')
        if not self.grace_seconds >= 0:
            raise ConfigError(f'--grace_seconds={self.grace_seconds} must be a number >= 0')


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens after an attempt.

    Attributes:
      exit_code: the exit code of the launcher, if it ends.
      processes: how many processes are started next, or None if the launcher ends.
      message: what is said about it, without a line end; '' if nothing is.
    """

    exit_code: int
    processes: int | None = None
    message: str = ''


def count_after_loss(original: int, remaining: int, minimum: int) -> int | None:
    """The largest number of processes that can replace the original ones, or None if none can.

    Args:
      original: the number at the first start. The result divides it, so that what was divided
        evenly among the processes still is.
      minimum: how many the user wants at least.
    """
    counts = range(remaining, minimum - 1, -1)
    return next((count for count in counts if count > 0 and original % count == 0), None)


def decide(config: LaunchConfig, attempt: Attempt, restarted: int) -> Decision:
    """Decides what happens after all processes have ended.

    `restarted` says how often they have been started again so far.
    """
    count, cause = len(attempt.ends), find_cause(attempt.ends)
    if cause is None:
        return Decision(0)
    code = cause.code if cause.code >= 0 else exit_code_after(-cause.code)
    stopped_by = attempt.stopped_by
    if stopped_by is not None and code in (RESTARTABLE, AFTER_CTRL_C):
        # A process that ends so has said where its state is saved.
        has_said = any(end.code in (RESTARTABLE, AFTER_CTRL_C) for end in attempt.ends)
        code = exit_code_after(stopped_by)
        return Decision(code, message='' if has_said else f'stopped by {stopped_by.name}')
    failure = describe_failure(attempt.ends)
    if config.restarts == 0 or stopped_by is not None:
        return Decision(code, message=failure)
    if code != RESTARTABLE:
        hint = f'exit code {code} is not followed by a restart'
        return Decision(code, message=f'{failure}\n{hint}')
    if restarted == config.restarts:
        return Decision(code, message=f'{failure}\nall {config.restarts} restarts have been used')
    last = f' ({cause.lines[-1]})' if cause.code > 0 and cause.lines else ''
    why = f'because process {cause.process} {cause}{last}'
    new, lost = count, lost_processes(attempt.ends)
    if config.min_processes is not None and lost:
        remaining = count - len(lost)
        found = count_after_loss(config.processes, remaining, config.min_processes)
        if found is None:
            hint = f'no restart: {remaining} of {count} processes remain, and --min_processes='
            return Decision(code, message=f'{failure}\n{hint}{config.min_processes}')
        new = found
    what = f'restart {restarted + 1} of {config.restarts}'
    if new != count:
        noun = 'process' if new == 1 else 'processes'
        now, before = (n * config.devices_per_process for n in (new, count))
        what += f': {new} {noun} with {now} devices in total instead of {count} with {before}'
    return Decision(code, new, f'{what}, {why}')


def run_attempts(
    config: LaunchConfig, make_children: Callable[[int, int], Sequence[Child]], command: str
) -> int:
    """Runs the processes until they are done, or fail without a restart.

    Their lines go to standard output, and what the launcher says to standard error. Returns the
    exit code: 0, or the exit code of the process that failed first. It is 75 if a signal killed
    that process, and after SIGTERM or SIGHUP, and 130 after Ctrl-C.

    Args:
      make_children: returns what each process runs, given their number and the port of process 0.
      command: the command that starts the run again, as one types it.
    """
    count, restarted = config.processes, 0
    with signal_inbox() as inbox:
        while True:
            with reserved_port() as port:
                children = make_children(count, port)
                attempt = supervise(children, Printer(), inbox, grace_seconds=config.grace_seconds)
            decision = decide(config, attempt, restarted)
            resume = f'; resume with: {command}' if attempt.stopped_by else ''
            if decision.message:
                print(f'{decision.message}{resume}', file=sys.stderr, flush=True)
            if decision.processes is None:
                return decision.exit_code
            count, restarted = decision.processes, restarted + 1
            select.select([inbox], [], [], SECONDS_BEFORE_RESTART)
            if received := read_inbox(inbox):
                name = signal.Signals(received[0]).name
                print(f'stopped by {name}; resume with: {command}', file=sys.stderr)
                return exit_code_after(received[0])
