"""How a process joins the others of its run: their channel first, and then jax's own."""

from __future__ import annotations

import atexit
import math
from typing import Any

import jax

from train.errors import ConfigError, first_line
from train.processes import signals
from train.processes.aborting import wait_before_aborting
from train.processes.channel import current_member, member, open_channel
from train.processes.errors import NotTogether
from train.processes.limits import Limits

# jax's own limits are longer than ours, because its end of a process is an abortion with a trace.
_TIMES_OURS = 4


def join_processes(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    auto_detect: bool = False,
    limits: Limits | None = None,
) -> None:
    """Connects this process to the others of a run with several processes.

    Args:
      coordinator_address: host:port of process 0.
      process_count: the number of processes.
      process_index: the index of this process.
      auto_detect: whether jax finds the three by itself (TPU pods).
      limits: how long the processes wait for each other, by default `Limits()`.

    Raises:
      ConfigError: if only some of the three are given, if the index is out of range, or if the
        processes have different packages.
      NotTogether: if the processes cannot connect in time.
    """
    given = [x is not None for x in (coordinator_address, process_count, process_index)]
    if any(given) and not all(given):
        raise ConfigError(
            '--coordinator_address, --process_count and --process_index must be given together'
        )
    if process_count is not None and process_index not in range(process_count):
        raise ConfigError(
            f'--process_index={process_index} must be from 0 to {process_count - 1}, because '
            f'--process_count={process_count}'
        )
    if not all(given) and not auto_detect:
        return
    limits = limits or Limits()
    if coordinator_address is not None and process_count is not None and process_index is not None:
        open_channel(coordinator_address, process_count, process_index, limits)
    # jax would stop the processes at different steps, or take SIGTERM for itself.
    jax.config.update('jax_enable_preemption_service', False)
    seconds: dict[str, Any] = {
        'initialization_timeout': math.ceil(_TIMES_OURS * limits.init_seconds),
        'heartbeat_timeout_seconds': math.ceil(_TIMES_OURS * limits.heartbeat_seconds),
        'shutdown_timeout_seconds': math.ceil(_TIMES_OURS * limits.heartbeat_seconds),
    }
    try:
        jax.distributed.initialize(coordinator_address, process_count, process_index, **seconds)
    except (ValueError, RuntimeError) as error:
        raise NotTogether(
            f'this process cannot connect to the others ({first_line(error)}): give '
            '--coordinator_address, --process_count and --process_index'
        ) from error
    one = member()
    signals.share(one.forward, one.leave)
    wait_before_aborting(lambda: f'process {one.index} was aborted by a library of C++')
    atexit.register(leave_processes)


def leave_processes() -> None:
    """Waits until all processes of the run are done. Without others it does nothing."""
    if one := current_member():
        one.leave()
