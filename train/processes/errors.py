"""Errors of runs of several processes."""

from __future__ import annotations

from train.errors import ConfigError
from train.processes.interrupted import RESTARTABLE


class NotTogether(ConnectionError):
    """The processes of a run have not found each other in time. Starting again may help.

    Attributes:
      exit_code: the exit code of a command that ends with it.
    """

    exit_code = RESTARTABLE


class Disagreement(ConfigError):
    """The processes of a run differ in what they must have in common.

    Args:
      message: what they differ in.
      details: a table of item, value and processes.
    """

    def __init__(self, message: str, details: str = ''):
        super().__init__(message)
        self.details = details


def raised_everywhere(error: BaseException) -> bool:
    """Whether all processes raise an error together, so that none has to tell the others."""
    return bool(getattr(error, 'raised_everywhere', False))


def note_raised_everywhere(error: BaseException) -> None:
    """Notes that all processes raise an error together."""
    error.raised_everywhere = True  # type: ignore[attr-defined]
