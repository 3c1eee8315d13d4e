"""The signals that end a run, the error that they raise, and the exit codes that follow.

This module is imported before all others, so it imports nothing that takes time.
"""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit codes of a command that a signal has ended with work left. 75 is EX_TEMPFAIL of
# sysexits.h, by which schedulers know to start it again; 130 is what shells report after Ctrl-C.
RESTARTABLE, AFTER_CTRL_C = 75, 130
# When a run ends, as messages say it.
NOTHING_TO_SAVE = 'with nothing new to save'
AT_ONCE = 'at once, because it is the second signal'

_command: list[str] = []


class Interrupted(KeyboardInterrupt):
    """A signal has ended a run that has work left.

    Args:
      signum: the signal.
      when: when it ended, and what has been saved.
      by: the process that received the signal, in a run of several.

    Attributes:
      signal: the signal.
      exit_code: the exit code of a command that ends with it.
    """

    def __init__(self, signum: int, when: str = NOTHING_TO_SAVE, by: int | None = None):
        self.signal = signal.Signals(signum)
        self.exit_code = exit_code_after(signum)
        to = '' if by is None else f' to process {by}'
        super().__init__(f'stopped by {self.signal.name}{to} {when}')


def exit_code_after(signum: int) -> int:
    """The exit code of a command that a signal has ended with work left."""
    return AFTER_CTRL_C if signum == signal.SIGINT else RESTARTABLE


def note_command(command: str) -> None:
    """Notes the command that this process runs, as one would type it again."""
    _command[:] = [command]


def how_to_resume() -> str:
    """What one does to resume, as the end of a line."""
    return f'; resume with: {_command[0]}' if _command else ''
