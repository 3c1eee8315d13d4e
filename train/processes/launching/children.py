"""What the launcher gives to the processes of a run: their environment, devices, and a port."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from train.errors import ConfigError, check_counts
from train.processes.secret import FILE_VARIABLE, VARIABLE
from train.processes.signals import RESTARTABLE

# The process id of the launcher, and the command that starts all processes again.
_LAUNCHER, _COMMAND = 'MESHWRIGHT_LAUNCHER', 'MESHWRIGHT_COMMAND'
_DEVICES_IN_XLA_FLAGS = '--xla_force_host_platform_device_count'
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def child_environment(
    environment: Mapping[str, str], command: str, gpus: Sequence[str], secret: str
) -> dict[str, str]:
    """Returns the environment of a child.

    Args:
      environment: the environment of the launcher, which is the current process.
      command: the command that starts all processes again, as one types it.
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
