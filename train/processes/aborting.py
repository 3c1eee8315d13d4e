"""What a process does when a library of C++ aborts it.

jax's runtime aborts a process as soon as process 0 is gone, often before Python has read from its
own connection why. The one line that says it, and the exit code that lets schedulers restart the
run, would be lost.
"""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable
from typing import Any

from train.processes import signals
from train.processes.output import print_error

# How long the hub may take to say which process is the cause.
SECONDS_FOR_THE_HUB = 3.0
_handlers: list[Any] = []  # ctypes needs them as long as they are installed


def wait_before_aborting(say: Callable[[], str], final_code: Callable[[], int | None]) -> None:
    """Gives the threads of Python time to end this process when C++ code aborts it.

    Args:
      say: returns a line about an abortion that has another reason.
      final_code: returns the exit code of a process that has nothing left to do, such as one whose
        coordinator is killed after the run. It ends with this code. None if it has work left.
    """
    libc = ctypes.CDLL(None)
    default = ctypes.c_void_p(0)

    def on_abort(signum: int) -> None:
        libc.signal(signal.SIGABRT, default)
        time.sleep(SECONDS_FOR_THE_HUB)
        if (code := final_code()) is not None:
            signals.end_process(code)
        print_error(say())

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    _handlers.append(handler)
    libc.signal(signal.SIGABRT, handler)
