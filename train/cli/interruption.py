"""How a command ends after a signal: one line that says what to do next, and an exit code."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence

from train.processes import signals
from train.processes.launching.attempts import command_of_launcher
from train.processes.signals import AFTER_CTRL_C, Interrupted, how_to_resume

EXIT_CODES = """\
exit codes: 0 if everything is done, 2 after an error that is explained, 75 if SIGTERM, SIGHUP, the
watchdog, a store or another process stopped it with work left, 130 after Ctrl-C. After 75 or 130,
repeat the command."""


_UNREAD = 128 + signal.SIGPIPE


def run_until_signal(command: Callable[[], int], line: str) -> int:
    """Runs a command. After a signal it prints how to resume, without a traceback.

    Returns the exit code of the command, 75 after SIGTERM or SIGHUP, 130 after Ctrl-C, or 141 if
    the reader of its output is gone, as in `meshwright --help | head -1`. The process of an
    interrupted command ends here, without waiting for threads that compile.
    """
    signals.handling.command = line
    try:
        with signals.handle():
            code = command()
            sys.stdout.flush()
        signals.finish(code)
        return code
    except Interrupted as interrupted:
        text, code = str(interrupted), interrupted.exit_code
    except KeyboardInterrupt as interrupted:  # with several processes, or a second signal
        text, code = str(interrupted) or 'stopped by SIGINT', AFTER_CTRL_C
    except BrokenPipeError:  # of the output, or of a connection
        if not _is_unread(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    gc.collect()  # removes the temporary folders of what the error has referred to
    with contextlib.suppress(OSError):
        print(f'{text}{how_to_resume()}', file=sys.stderr, flush=True)
    return signals.end_process(code)


def _is_unread(pipe: int) -> bool:
    """Whether the other end of an open pipe is closed."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def line_of_process(name: str) -> str:
    """The command of this process as one types it, which may be the command of its launcher."""
    if launcher := command_of_launcher():
        return launcher
    found = shutil.which(name)
    same = found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0])
    return shlex.join([name if same else sys.argv[0], *sys.argv[1:]])


def line_of_module(module: str, arguments: Sequence[str]) -> str:
    """The command `python -m MODULE ...` as it was typed."""
    given = sys.orig_argv
    python = given[: given.index('-m')] if '-m' in given else ['python']
    return shlex.join([*python, '-m', module, *arguments])
