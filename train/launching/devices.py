"""The devices of this machine, divided among processes. jax is not asked: it would take them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from train.errors import ConfigError, check_counts

# As many as a process has that runs alone, so that a run keeps its mesh.
_VIRTUAL_DEVICES = 8
_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')


def visible_gpus(environment: Mapping[str, str], folder: str = '/dev') -> list[str]:
    """Returns the NVIDIA GPUs that jax would use in this environment, by their CUDA names.

    Args:
      environment: the environment variables.
      folder: where the kernel lists its devices.
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

    Args:
      given: the user's choice. By default, the GPUs are divided evenly; without any, there are
        eight virtual devices in total, or one per process if there are more processes.
      processes: the number of processes.
      gpus: the GPUs of this machine.

    Raises:
      ConfigError: if a number is not positive, or if there are too few GPUs.
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
