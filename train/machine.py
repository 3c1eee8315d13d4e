"""The machine a run finds itself on: virtual devices, other processes, a model axis that fits."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import gin
import jax
import numpy as np

from train.errors import ConfigError, first_line

DEFAULT_CPU_DEVICES = 8
LONGEST_MESSAGE = 1000  # bytes


def use_virtual_devices(count: int | None) -> None:
    """Splits the CPU into virtual devices, before jax looks at its devices.

    It matters only where there is nothing but a CPU: jax prefers any other platform.

    Args:
      count: how many; None: what XLA_FLAGS or JAX_NUM_CPU_DEVICES say, else 8.

    Raises:
      ConfigError: a count beside one in the environment.
    """
    in_flags = 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', '')
    if not in_flags and 'JAX_NUM_CPU_DEVICES' not in os.environ:
        jax.config.update('jax_num_cpu_devices', count or DEFAULT_CPU_DEVICES)
    elif count is not None:
        where = 'XLA_FLAGS' if in_flags else 'JAX_NUM_CPU_DEVICES'
        raise ConfigError(f'--cpu_devices={count} and a count in {where}: leave one of them out')


def join_processes(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    found_out: bool,
) -> None:
    """Makes this process one of several, if it is to be.

    Args:
      coordinator_address: host:port of process 0.
      process_count: how many there are.
      process_index: which of them this one is.
      found_out: jax finds these three out from the environment (TPU pods, Slurm).

    Raises:
      ConfigError: some of the three without the others.
    """
    given = [x is not None for x in (coordinator_address, process_count, process_index)]
    if any(given) and not all(given):
        raise ConfigError('--coordinator_address, --process_count and --process_index go together')
    if process_count is not None and process_index not in range(process_count):
        raise ConfigError(f'--process_index={process_index} is not below {process_count}')
    if all(given) or found_out:
        try:
            jax.distributed.initialize(coordinator_address, process_count, process_index)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f'the processes did not find each other ({first_line(error)}): give '
                '--coordinator_address, --process_count and --process_index'
            ) from error


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """What one of several processes fails at, all of them hear of: none waits for one that is gone.

    All processes enter it together; within it they do not wait for each other.

    Raises:
      Exception: as within; on the other processes a ConfigError, naming the first that failed.
    """
    if jax.process_count() == 1:
        yield
        return
    from jax.experimental import multihost_utils

    message: bytes = b''
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: the others would wait for this process for ever
        message, failure = first_line(error).encode() or b'?', error
    told = np.zeros(LONGEST_MESSAGE, np.uint8)
    told[: len(message)] = np.frombuffer(message[:LONGEST_MESSAGE], np.uint8)
    messages = np.asarray(multihost_utils.process_allgather(told))
    if failure is not None:
        raise failure
    for process in np.flatnonzero(messages.any(axis=1)).tolist():
        said = messages[process].tobytes().rstrip(b'\0').decode(errors='replace')
        raise ConfigError(f'process {process} failed: {said}')


def check_same_step(step: int) -> None:
    """Each process goes on from the same checkpoint; all of them call this together.

    Raises:
      ConfigError: with the step that each process has found.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    steps = np.asarray(multihost_utils.process_allgather(np.int32(step))).tolist()
    if len(set(steps)) > 1:
        raise ConfigError(
            f'the processes find checkpoints of different steps, {steps} by process (0: none): the '
            'same folder must be on all hosts'
        )


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C and SIGTERM into a question that the training loop asks after each step.

    So the step at hand is finished and saved; a second signal stops the run at once. Several
    processes would have to agree on the step: there, Ctrl-C stops at once, and jax keeps SIGTERM to
    itself.

    Yields:
      A function that says whether a signal has come.
    """
    asked = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if alone else ()
    before = {s: signal.signal(s, ask) for s in signals}
    try:
        yield asked.is_set
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@gin.configurable
def num_partitions_that_fit(most: int) -> int:
    """The largest model axis that divides both `most` and the devices there are: 1 on one GPU."""
    return math.gcd(most, jax.device_count())
