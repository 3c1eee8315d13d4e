"""The output of several processes as one stream of whole lines."""

from __future__ import annotations

import collections
import os
import select

from partitioning.untrusted_text import printable

# A longer line is printed in pieces.
MAX_LINE_BYTES = 64 * 1024
# Children are not read while more than this waits to be printed.
MAX_PENDING_BYTES = 256 * 1024
# What is kept of each process, to explain its end.
LAST_LINES = 200
# cyan, yellow, green, magenta, blue, and their bright forms
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class LineReader:
    """Puts the output of one process together, line by line.

    Args:
      process: the index of the process. Lines may begin with it, such as `[2] `; it is removed.

    Attributes:
      last: the last lines, without line ends.
    """

    def __init__(self, process: int) -> None:
        self._begun, self._prefix = b'', f'[{process}] '
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that these bytes complete."""
        *whole, self._begun = (self._begun + data).split(b'\n')
        while len(self._begun) > MAX_LINE_BYTES:
            whole.append(self._begun[:MAX_LINE_BYTES])
            self._begun = self._begun[MAX_LINE_BYTES:]
        return self._note(whole)

    def close(self) -> list[str]:
        """Returns the line that has no end, if there is one."""
        begun, self._begun = self._begun, b''
        return self._note([begun] if begun else [])

    def _note(self, lines: list[bytes]) -> list[str]:
        """Keeps what a terminal would show of lines, without control characters except tabs."""
        texts = []
        for line in lines:
            # A carriage return starts the line anew, as progress bars do.
            shown = line.rstrip(b'\r').rpartition(b'\r')[2].decode(errors='replace')
            shown = '\t'.join(map(printable, shown.split('\t')))
            texts.append(shown.removeprefix(self._prefix))
        self.last.extend(texts)
        return texts


def prefixed(process: int, line: str, colour: bool = False) -> str:
    """Returns a line that begins with the index of its process, such as `[2] `.

    Args:
      process: the index.
      colour: whether the index has the colour of its process.
    """
    index = f'[{process}]'
    if colour:
        index = f'\x1b[{_COLOURS[process % len(_COLOURS)]}m{index}\x1b[0m'
    return f'{index} {line}'.rstrip()


class Printer:
    """Prints lines without ever waiting for the terminal or the pipe that receives them.

    Args:
      fd: the file descriptor.
    """

    def __init__(self, fd: int = 1):
        self.fd = fd
        self._colour = os.isatty(fd) and 'NO_COLOR' not in os.environ
        self._pending = bytearray()
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be printed."""
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that the children should wait, too."""
        return len(self._pending) > MAX_PENDING_BYTES

    def add(self, process: int, lines: list[str]) -> None:
        """Adds lines of a process to what is printed."""
        if not self._closed:
            text = ''.join(f'{prefixed(process, line, self._colour)}\n' for line in lines)
            self._pending += text.encode()

    def write(self) -> None:
        """Prints some of it. Call it when the file descriptor can be written."""
        try:
            written = os.write(self.fd, self._pending[: select.PIPE_BUF])
        except BlockingIOError:
            return
        except OSError:  # The terminal has been closed, or the program that reads has ended.
            self.discard()
            return
        del self._pending[:written]

    def discard(self) -> None:
        """Prints nothing any more, so that the run can save its state."""
        self._closed = True
        self._pending.clear()
