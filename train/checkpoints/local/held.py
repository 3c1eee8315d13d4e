"""The parts of local checkpoints that one process has, below the local folder of its host.

The folder of a part is `<local_dir>/<start>/<slot>/<part>-of-<count>/<step>`. A start is one start
of a run, whose name is random, so runs that share a folder do not meet. A slot belongs to one of
the processes of a host. If a later start has fewer of them, they take over the slots of others.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator

from etils import epath

from partitioning.untrusted_text import is_own_folder
from train.checkpoints.local.parts import Key
from train.checkpoints.steps.finding import delete_step, examine, find_steps, make_room
from train.checkpoints.steps.record import unfinished_file


class HeldParts:
    """The parts in the slots of a process. Several threads may use it.

    Args:
      directory: the local folder of the host.
      slot: the number of this process among the processes of its host.
      count: the number of processes of the host.
    """

    def __init__(self, directory: epath.Path, slot: int, count: int):
        self._directory, self._slot, self._count = directory, slot, count
        self._folders = dict[Key, epath.Path]()
        self._lock = threading.Lock()

    def find(self, starts: Collection[str], say: Callable[[str], None]) -> None:
        """Looks for good parts of these starts. `say` gets a line for each damaged one."""
        for start in starts:
            for folder, step, key in self._look(start):
                found = examine(folder, step, contents=True)
                if found.status == 'good':
                    self.add(key, folder)
                elif found.status == 'damaged':
                    say(f'{found.reason}: the other copy of this part is looked for')

    def _look(self, start: str) -> Iterator[tuple[epath.Path, int, Key]]:
        slots = self._directory / start
        for slot in slots.iterdir() if is_own_folder(slots) else ():
            if not slot.name.isdecimal() or int(slot.name) % self._count != self._slot:
                continue
            for parts in slot.iterdir():
                if named := re.fullmatch(r'(\d+)-of-(\d+)', parts.name):
                    part, of = map(int, named.groups())
                    for step, folder in find_steps(parts)[0].items():
                        yield folder, step, Key(start, step, part, of)

    def all(self) -> list[Key]:
        """All parts, in ascending order."""
        with self._lock:
            return sorted(self._folders)

    def folder(self, key: Key) -> epath.Path | None:
        """The folder of a part, or None if this process does not have it."""
        return self._folders.get(key)

    def add(self, key: Key, folder: epath.Path) -> None:
        """Notes a complete part."""
        with self._lock:
            self._folders[key] = folder

    def prepare(self, key: Key) -> epath.Path:
        """Returns a new folder for a part, which replaces an earlier attempt to write it."""
        folder = self._directory / key.start / str(self._slot) / key.folder
        (self._directory / key.start).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_room(folder, key.step, needs_manifest=True, is_damaged=True)
        unfinished_file(folder).write_text('')  # so that it is known whose folder it is
        folder.mkdir(exist_ok=True)
        return folder

    def complete(self, key: Key, folder: epath.Path) -> None:
        """Notes that the manifest of a prepared folder has been written."""
        unfinished_file(folder).unlink(missing_ok=True)
        self.add(key, folder)

    def abandon(self, folder: epath.Path) -> None:
        """Frees the space of a part that could not be written."""
        with contextlib.suppress(OSError):
            delete_step(folder)

    def delete_others(
        self, starts: Collection[str], kept: Collection[tuple[str, int]], current: str | None = None
    ) -> None:
        """Deletes the parts of these starts, except those of some starts and steps.

        Empty folders stay only in the `current` start, where other processes make new ones. Raises
        an OSError if a part cannot be deleted.
        """
        for start in starts:
            for folder, step, key in list(self._look(start)):
                if (start, step) not in kept:
                    with self._lock:
                        self._folders.pop(key, None)
                    delete_step(folder)
            if start != current:
                self._remove_empty(self._directory / start)

    def _remove_empty(self, start: epath.Path) -> None:
        """Removes what is empty of the folder of a start."""
        folders = [*start.glob('*/*'), *start.glob('*')] if start.is_dir() else []
        for folder in [*folders, start]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
