"""Runs the processes of a run, each with its devices, and starts them again after some failures."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from train.errors import ConfigError, check_counts
from train.processes.launching.ahead import ProgramsAhead
from train.processes.launching.endings import (
    Attempt,
    Printer,
    describe_failure,
    find_cause,
    lost_processes,
)
from train.processes.launching.spares import LOST_AT, Child, Spares
from train.processes.launching.supervision import read_inbox, signal_inbox, supervise
from train.processes.secret import FILE_VARIABLE, VARIABLE
from train.processes.signals import AFTER_CTRL_C, RESTARTABLE, exit_code_after

# The process id of the launcher, and the command that starts all processes again.
_LAUNCHER, _COMMAND = 'MESHWRIGHT_LAUNCHER', 'MESHWRIGHT_COMMAND'
_DEVICES_IN_XLA_FLAGS = '--xla_force_host_platform_device_count'
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def child_environment(
    environment: Mapping[str, str], command: str, gpus: Sequence[str], secret: str
) -> dict[str, str]:
    """Returns the environment of a child.

    Args:
      gpus: the GPUs of the child; without any, it uses virtual devices of the CPU.
      secret: the secret of the run, unless the environment has one.
    """
    child = dict(environment)
    # The flag --cpu_devices decides, and refuses a second opinion.
    child.pop('JAX_NUM_CPU_DEVICES', None)
    if 'XLA_FLAGS' in child:
        flags = child['XLA_FLAGS'].split()
        kept = [flag for flag in flags if not flag.startswith(_DEVICES_IN_XLA_FLAGS)]
        child['XLA_FLAGS'] = ' '.join(kept)
    if gpus:
        child['CUDA_VISIBLE_DEVICES'] = ','.join(gpus)
    if FILE_VARIABLE not in child:
        child.setdefault(VARIABLE, secret)
    child['PYTHONUNBUFFERED'] = '1'  # Lines appear when they are printed, and in their order.
    return child | {_LAUNCHER: str(os.getpid()), _COMMAND: command}


def command_of_launcher() -> str | None:
    """The command that starts all processes again, or None if no launcher started this one."""
    return os.environ.get(_COMMAND)


def end_with_launcher() -> None:
    """Makes the kernel kill this process when its launcher ends, even if by SIGKILL.

    It has no effect in a process that no launcher started. Only Linux can do it; elsewhere, the
    launcher must end by itself to end its children.
    """
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None:
        return
    if sys.platform == 'linux':
        number = ctypes.c_ulong(signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(launcher):  # It has ended in the meantime.
        os._exit(RESTARTABLE)


# ---- devices. jax is not asked, because it would take them.

# As many as a process has that runs alone, so that a run keeps its mesh.
_VIRTUAL_DEVICES = 8
_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')


def visible_gpus(environment: Mapping[str, str], folder: str = '/dev') -> list[str]:
    """Returns the NVIDIA GPUs that jax would use in this environment, by their CUDA names.

    `folder` is where the kernel lists its devices.
    """
    platforms = environment.get('JAX_PLATFORMS', '')
    if platforms and not {'cuda', 'gpu'} & set(platforms.split(',')):
        return []
    if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return []
    found = sorted(p.name for p in Path(folder).glob('nvidia[0-9]*'))
    if found and 'CUDA_VISIBLE_DEVICES' in environment:
        return [name for name in environment['CUDA_VISIBLE_DEVICES'].split(',') if name]
    return [str(number) for number in range(len(found))]


def devices_per_process(given: int | None, processes: int, gpus: list[str]) -> int:
    """Returns the number of devices of each process.

    `given` is the user's choice. By default, the GPUs are divided evenly; without any, there are
    eight virtual devices in total, or one per process if there are more processes. Raises a
    ConfigError if a number is not positive, or if there are too few GPUs.
    """
    check_counts(**{'--processes': processes})
    if given is not None:
        check_counts(**{'--devices_per_process': given})
    if not gpus:
        return given or max(1, _VIRTUAL_DEVICES // processes)
    count = given or max(1, len(gpus) // processes)
    if count * processes > len(gpus):
        raise ConfigError(
            f'--processes={processes} with {count} GPUs each need {count * processes} GPUs, and '
            f'there are {len(gpus)}: ask for fewer, or set JAX_PLATFORMS=cpu for virtual devices'
        )
    return count


# ---- the port


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a port, which it yields, and no other program gets while the context is open.

    The socket that reserves it never listens. It allows other sockets of this user on the port, so
    process 0 can listen there, and then jax's coordinator.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(('', 0))
        yield holder.getsockname()[1]


# So that a run which fails at once does not fill the log.
SECONDS_BEFORE_RESTART, SECONDS_OF_A_FAST_FAILURE = 1.0, 20.0


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
      spares: whether processes that have imported everything wait for a restart.
      compile_ahead: whether programs for fewer processes are compiled while the run is under way.
    """

    processes: int
    devices_per_process: int
    restarts: int = 0
    min_processes: int | None = None
    grace_seconds: float = 5.0
    spares: bool = False
    compile_ahead: bool = False

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
        if self.spares and self.restarts == 0:
            raise ConfigError('--spares needs --restarts=N, with N >= 1')
        if self.compile_ahead and not self.smaller_counts():
            raise ConfigError(
                '--compile_ahead needs --min_processes=M, and a divisor of '
                f'--processes={self.processes} from M to {self.processes - 1} to compile for'
            )
        if not self.grace_seconds >= 0:
            raise ConfigError(f'--grace_seconds={self.grace_seconds} must be a number >= 0')

    def smaller_counts(self) -> list[int]:
        """The numbers of processes with which the run may continue, the largest first."""
        counts, remaining = list[int](), self.processes
        while self.min_processes is not None:
            found = count_after_loss(self.processes, remaining - 1, self.min_processes)
            if found is None:
                break
            counts.append(found)
            remaining = found
        return counts


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


def _noting(child: Child, lost_at: float | None) -> Child:
    """A child that knows when the failure was seen after which it is started."""
    if lost_at is None:
        return child
    environment = {**child.environment, LOST_AT: str(lost_at)}
    return dataclasses.replace(child, environment=environment)


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
    count, restarted, printer = config.processes, 0, Printer()
    lost_at: float | None = None

    @contextlib.contextmanager
    def with_port(count: int) -> Iterator[Sequence[Child]]:
        with reserved_port() as port:
            yield make_children(count, port)

    ahead = None
    if config.compile_ahead:
        ahead = ProgramsAhead(config.smaller_counts(), with_port, printer.say)
    with signal_inbox() as inbox, contextlib.ExitStack() as stack:
        spares: Spares | None = None
        while True:
            began = time.monotonic()
            with with_port(count) as made:
                children = [_noting(child, lost_at) for child in made]
                if config.spares and spares is None:
                    spares = Spares(children[0].command, children[0].environment, count)
                    stack.callback(spares.close)
                attempt = supervise(
                    children,
                    printer,
                    inbox,
                    grace_seconds=config.grace_seconds,
                    spares=spares,
                    ahead=ahead,
                )
            lost_at = attempt.failed_at
            decision = decide(config, attempt, restarted)
            resume = f'; resume with: {command}' if attempt.stopped_by else ''
            if decision.message:
                print(f'{decision.message}{resume}', file=sys.stderr, flush=True)
            if decision.processes is None:
                return decision.exit_code
            count, restarted = decision.processes, restarted + 1
            failed_fast = time.monotonic() - began < SECONDS_OF_A_FAST_FAILURE
            select.select([inbox], [], [], SECONDS_BEFORE_RESTART if failed_fast else 0)
            if received := read_inbox(inbox):
                name = signal.Signals(received[0]).name
                print(f'stopped by {name}; resume with: {command}', file=sys.stderr)
                return exit_code_after(received[0])
