"""Sets up the devices of a run, and says what its steps must do on this machine."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterator

import jax

from partitioning.hardware import check_devices, use_cpu_without_accelerators
from train.errors import ConfigError

DEFAULT_CPU_DEVICES = 8


def use_virtual_devices(count: int | None) -> None:
    """Splits the CPU into virtual devices. Call it before jax looks at its devices.

    The setting only matters on a machine without accelerators: jax prefers any other platform.
    `count` is the number of devices. By default, XLA_FLAGS or JAX_NUM_CPU_DEVICES decide, and
    without them there are 8. Raises a ConfigError if `count` is given and the environment sets a
    number of devices, too.
    """
    use_cpu_without_accelerators()
    in_flags = 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', '')
    if not in_flags and 'JAX_NUM_CPU_DEVICES' not in os.environ:
        jax.config.update('jax_num_cpu_devices', count or DEFAULT_CPU_DEVICES)
    elif count is not None:
        where = 'XLA_FLAGS' if in_flags else 'JAX_NUM_CPU_DEVICES'
        raise ConfigError(
            f'--cpu_devices={count} conflicts with the number of devices in {where}: remove one'
        )


def must_wait_for_steps() -> bool:
    """Whether a step must end before the next one is dispatched.

    Several processes on CPUs whose programs run ahead of each other were observed to wait forever
    for each other's collectives. So was a single process that uses the same collectives, because it
    was told that it is one of one.
    """
    return jax.distributed.is_initialized() and jax.default_backend() == 'cpu'


@contextlib.contextmanager
def collect_garbage(every: int) -> Iterator[Callable[[int], None]]:
    """Collects Python's garbage only in the function that it yields, to be called with each step.

    `every` is the number of steps between collections. 0 leaves them to Python.
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
