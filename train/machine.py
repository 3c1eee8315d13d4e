"""The machine a run finds itself on: virtual devices, other processes, a model axis that fits."""

from __future__ import annotations

import math
import os

import gin
import jax

from train.errors import ConfigError


def use_virtual_devices(count: int) -> None:
    """Splits the CPU into virtual devices, before jax looks at its devices.

    It matters only where there is nothing but a CPU: jax prefers any other platform. A count in
    XLA_FLAGS stands.
    """
    if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
        jax.config.update('jax_num_cpu_devices', count)


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
    if all(given) or found_out:
        jax.distributed.initialize(coordinator_address, process_count, process_index)


@gin.configurable
def num_partitions_that_fit(most: int) -> int:
    """The largest model axis that divides both `most` and the devices there are: 1 on one GPU."""
    return math.gcd(most, jax.device_count())
