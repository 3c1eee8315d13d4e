"""What the launcher tells its children, the processes of a run, through their environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from train.processes.interrupted import RESTARTABLE

# The process id of the launcher, and the command that starts all processes again.
_LAUNCHER, _COMMAND = 'MESHWRIGHT_LAUNCHER', 'MESHWRIGHT_COMMAND'
_DEVICES_IN_XLA_FLAGS = '--xla_force_host_platform_device_count'
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def child_environment(
    environment: Mapping[str, str], command: str, gpus: Sequence[str]
) -> dict[str, str]:
    """Returns the environment of a child.

    Args:
      environment: that of the launcher, whose process is the current one.
      command: the command that starts all processes again, as one types it.
      gpus: the GPUs of the child, or none if it uses virtual devices of the CPU.
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
