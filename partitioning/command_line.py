"""The parser of every command: errors of one line, and help as wide as the terminal."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from typing import Any, NoReturn

from partitioning.untrusted_text import printable


class FoldedHelp(argparse.HelpFormatter):
    """Folds the paragraphs of a description at the width of the terminal.

    Lines that are indented, such as examples, stay as they are, so that they can be pasted.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for prose, group in itertools.groupby(text.strip().splitlines(), _is_prose):
            if prose:
                lines += textwrap.wrap(' '.join(group), width, break_on_hyphens=False)
            else:
                lines += group
        return '\n'.join(indent + line if line else line for line in lines)


def _is_prose(line: str) -> bool:
    return bool(line) and not line.startswith(' ')


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help is as wide as the terminal.

    The description says what the command does, with examples that have {prog} for its name.
    """

    def __init__(self, prog: str, usage: str = '', description: str = '', **settings: Any):
        super().__init__(
            prog=prog,
            usage=f'{prog} {usage}' if usage else None,
            description=description.format(prog=prog),
            formatter_class=FoldedHelp,
            allow_abbrev=False,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {printable(message)}; see {self.prog} --help\n')
