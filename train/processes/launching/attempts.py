"""Runs the processes of a run, and starts them again as often as the user allows."""

from __future__ import annotations

import dataclasses
import select
import signal
import sys
from collections.abc import Callable, Sequence

from train.errors import ConfigError, check_counts
from train.processes.interrupted import exit_code_after
from train.processes.launching.children import reserved_port
from train.processes.launching.endings import decide
from train.processes.launching.lines import Printer
from train.processes.launching.supervision import Child, read_inbox, signal_inbox, supervise

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


def run_attempts(
    config: LaunchConfig, make_children: Callable[[int, int], Sequence[Child]], command: str
) -> int:
    """Runs the processes until they are done, or fail without a restart.

    Their lines go to standard output, and what the launcher says to standard error.

    Args:
      config: the settings.
      make_children: returns what each process runs, given their number and the port of process 0.
      command: the command that starts the run again, as one types it.

    Returns:
      The exit code: 0, or that of the process that failed first. It is 75 if that process was
      killed by a signal, and after SIGTERM or SIGHUP, and 130 after Ctrl-C.
    """
    count, restarted = config.processes, 0
    with signal_inbox() as inbox:
        while True:
            with reserved_port() as port:
                children = make_children(count, port)
                grace = config.grace_seconds
                attempt = supervise(children, Printer(), inbox, grace_seconds=grace)
            decision = decide(
                attempt,
                original=config.processes,
                devices=config.devices_per_process,
                restarts=config.restarts,
                restarted=restarted,
                min_processes=config.min_processes,
            )
            resume = f'; resume with: {command}' if attempt.stopped_by else ''
            if decision.message:
                print(f'{decision.message}{resume}', file=sys.stderr, flush=True)
            if decision.processes is None:
                return decision.exit_code
            count, restarted = decision.processes, restarted + 1
            if signum := _wait_for_signal(inbox, SECONDS_BEFORE_RESTART):
                print(f'stopped by {signum.name}; resume with: {command}', file=sys.stderr)
                return exit_code_after(signum)


def _wait_for_signal(inbox: int, seconds: float) -> signal.Signals | None:
    """Returns the first signal within a time, or None."""
    select.select([inbox], [], [], seconds)
    received = read_inbox(inbox)
    return signal.Signals(received[0]) if received else None
