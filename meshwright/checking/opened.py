"""Which files of a folder a process has opened."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


class OpenedFiles:
    """Notes the files of a folder that this process opens from now on, and its modules.

    Files that other processes open are not seen.

    Args:
      folder: the folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder.resolve()
        self._opened: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == 'open' and isinstance(arguments[0], str):
            self._opened.add(arguments[0])

    def list_files(self) -> list[str]:
        """Their paths from the folder."""
        modules = [getattr(module, '__file__', None) for module in list(sys.modules.values())]
        found = set()
        for path in [*self._opened, *modules]:
            if not isinstance(path, str) or path.endswith('.pyc'):
                continue
            whole = Path(os.path.abspath(path))
            for one in {whole, whole.resolve()}:
                if one.is_relative_to(self._folder):
                    found.add(str(one.relative_to(self._folder)))
        return sorted(found)
