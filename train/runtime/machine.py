"""The machine that a run uses: virtual devices, its processes, and how they agree."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from partitioning.hardware import check_devices
from train.errors import ConfigError, first_line

DEFAULT_CPU_DEVICES = 8
MAX_MESSAGE_BYTES = 1000


def use_virtual_devices(count: int | None) -> None:
    """Splits the CPU into virtual devices. Call it before jax looks at its devices.

    The setting only matters on a machine without accelerators: jax prefers any other platform.

    Args:
      count: the number of devices. By default, XLA_FLAGS or JAX_NUM_CPU_DEVICES decide, and
        without them there are 8.

    Raises:
      ConfigError: if `count` is given and the environment sets a number of devices, too.
    """
    in_flags = 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', '')
    if not in_flags and 'JAX_NUM_CPU_DEVICES' not in os.environ:
        jax.config.update('jax_num_cpu_devices', count or DEFAULT_CPU_DEVICES)
    elif count is not None:
        where = 'XLA_FLAGS' if in_flags else 'JAX_NUM_CPU_DEVICES'
        raise ConfigError(
            f'--cpu_devices={count} conflicts with the number of devices in {where}: remove one'
        )


def join_processes(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    auto_detect: bool,
) -> None:
    """Connects this process to the others of a run with several processes.

    Args:
      coordinator_address: host:port of process 0.
      process_count: the number of processes.
      process_index: the index of this process.
      auto_detect: whether jax reads the three from the environment (TPU pods, Slurm).

    Raises:
      ConfigError: if only some of the three are given, if the index is out of range, or if the
        processes cannot connect.
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
    if all(given) or auto_detect:
        try:
            jax.distributed.initialize(coordinator_address, process_count, process_index)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f'this process cannot connect to the others ({first_line(error)}): give '
                '--coordinator_address, --process_count and --process_index'
            ) from error


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Raises an error on every process if the body fails on any of them.

    Without it, the other processes would wait forever for the one that failed. All processes must
    enter the context together. The body must not contain anything that waits for other processes.

    Raises:
      Exception: the body's own error, on the processes where it failed.
      ConfigError: on the other processes, with the first process that failed and its message. It is
        of the same type if that error is a ConfigError.
    """
    if jax.process_count() == 1:
        yield
        return
    from jax.experimental import multihost_utils

    message: bytes = b''
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # Any error must reach the other processes.
        message, failure = f'{type(error).__name__}\n{first_line(error)}'.encode(), error
    padded = np.zeros(MAX_MESSAGE_BYTES, np.uint8)
    padded[: len(message)] = np.frombuffer(message[:MAX_MESSAGE_BYTES], np.uint8)
    messages = np.asarray(multihost_utils.process_allgather(padded))
    if failure is not None:
        raise failure
    for process in np.flatnonzero(messages.any(axis=1)).tolist():
        text = messages[process].tobytes().rstrip(b'\0').decode(errors='replace')
        name, _, line = text.partition('\n')
        raise _config_error(name)(f'process {process} failed: {line}')


def _config_error(name: str) -> type[ConfigError]:
    """The type of ConfigError that has a name, or ConfigError itself."""
    types = [ConfigError]
    for kind in types:  # It grows by the types that are found.
        types += kind.__subclasses__()
    return next((kind for kind in types if kind.__name__ == name), ConfigError)


def check_same_step(step: int) -> None:
    """Checks that all processes start from the same step. All of them must call it together.

    Raises:
      ConfigError: if they differ, with the step of each process.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    steps = np.asarray(multihost_utils.process_allgather(np.int32(step))).tolist()
    if len(set(steps)) > 1:
        raise ConfigError(
            f'the processes found checkpoints of different steps: {steps}, in the order of the '
            'processes (0 means none). MODEL_DIR must be on storage that all hosts share'
        )


def agree_on(value: Any) -> Any:
    """Returns the value of process 0, a number. All processes must call it together."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(value)


def any_process(condition: bool) -> bool:
    """Whether a condition holds on any process. All processes must call it together."""
    if jax.process_count() == 1:
        return condition
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.bool_(condition))).any())


def must_wait_for_steps() -> bool:
    """Whether a step must end before the next one is dispatched.

    Several processes on CPUs whose programs run ahead of each other were observed to wait forever
    for each other's collectives.
    """
    return jax.process_count() > 1 and jax.default_backend() == 'cpu'


@contextlib.contextmanager
def collect_garbage(every: int) -> Iterator[Callable[[int], None]]:
    """Collects Python's garbage after every n-th step only, so that no step waits for it.

    Args:
      every: the number of steps between collections. 0 leaves them to Python.

    Yields:
      A function that is called with each step.
    """
    was_enabled = gc.isenabled()
    if every:
        gc.disable()

    def collect(step: int) -> None:
        if every and step % every == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if every and was_enabled:
            gc.enable()


def num_partitions_that_fit(maximum: int) -> int:
    """Returns the largest divisor of `maximum` that divides the number of devices, too.

    It is the size of a model axis that fits any machine: 1 on one GPU, for example.
    """
    return math.gcd(maximum, len(check_devices(None)))
