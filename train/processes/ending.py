"""The end of a process that is stuck: one line, the stacks of its threads, an exit code."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from pathlib import Path

from partitioning.untrusted_text import printable
from train.paths import is_remote
from train.processes.interrupted import RESTARTABLE
from train.processes.output import error_fd, print_error

# The longest time in which the stacks are written: the storage may be what the run waits for.
SECONDS_TO_WRITE = 30.0


def end_process(message: str, model_dir: str | os.PathLike[str], process: int) -> None:
    """Prints a message, writes the stacks of all threads, and ends the process with RESTARTABLE."""
    # Printing and writing may wait forever for what the run waits for, so another thread does it.
    report = threading.Thread(target=_report, args=(message, model_dir, process), daemon=True)
    report.start()
    report.join(SECONDS_TO_WRITE)
    os._exit(RESTARTABLE)


def _report(message: str, model_dir: str | os.PathLike[str], process: int) -> None:
    folder = Path() if is_remote(model_dir) else Path(model_dir).expanduser()
    if is_remote(model_dir) or not folder.is_dir():
        folder = Path(tempfile.gettempdir())
    path, where = folder / f'stacks-of-process-{process}.txt', ''
    print_error(printable(message))
    try:
        with path.open('a') as file:
            file.write(f'{time.strftime("%Y-%m-%d %H:%M:%S")} {message}\n')
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        where = f'the stacks of all threads are in {path}; '
    except OSError:
        faulthandler.dump_traceback(error_fd(), all_threads=True)
    print_error(f'{where}exit code {RESTARTABLE}, so that a scheduler can start the run again')
