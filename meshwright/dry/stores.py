"""Keeps a script from changing files: what it writes goes to a folder that is removed at the end.

The script reads back what it wrote, and everything else as it is. Files in the folders for
temporary files and for devices are written as usual, unless the script was started there.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from meshwright.jax_private import Replacement

_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_read_link = os.readlink  # a script sees another one
_FOR_ALL = ('/dev', '/proc')


class Stores:
    """The files that a script would have written.

    Attributes:
      folder: where they are, with a separator at the end.
      refused: their paths and those that it would have removed, each once, in this order.
    """

    def __init__(self, folder: Path):
        self.folder = os.path.realpath(folder) + os.sep
        self._home = os.getcwd() + os.sep
        temporary = os.path.realpath(tempfile.gettempdir())
        self._free = tuple(path + os.sep for path in (temporary, *_FOR_ALL))
        self.refused: dict[str, None] = {}

    def replacements(self) -> list[Replacement]:
        """What to put in place of functions of the standard library."""
        reads = ('stat', 'lstat', 'access', 'readlink')
        writes = ('chmod', 'utime', 'truncate')
        removes = ('rmdir', 'remove', 'unlink')
        moves = ('rename', 'replace', 'symlink', 'link')
        read = functools.partial(self._at, self.seen)
        write = functools.partial(self._at, self.written)
        kinds = ((reads, read), (writes, write), (removes, self._remove))
        return [
            *((module, 'open', self._open(open, writes_mode)) for module in (builtins, io)),
            (os, 'open', self._open(os.open, _writes_flags)),
            (os, 'mkdir', self._mkdir(os.mkdir)),
            (os, 'listdir', self._listdir(os.listdir)),
            (os, 'scandir', self._scandir(os.scandir)),
            *((os, name, wrap(getattr(os, name))) for names, wrap in kinds for name in names),
            *((os, name, self._move(getattr(os, name))) for name in moves),
            (shutil, 'rmtree', self._remove(shutil.rmtree)),
        ]

    # Paths.

    def _guarded(self, path: Any) -> str | None:
        """The absolute path of what must not be changed; None for what may be."""
        if path is None or isinstance(path, int):  # an open file
            return None
        given = os.fsdecode(os.fspath(path))
        if '://' in given:  # a store, which only some libraries know
            return given.rstrip('/')
        absolute = os.path.abspath(given)
        if absolute.startswith(self.folder):
            return None
        inside = absolute + os.sep
        is_free = inside.startswith(self._free) and not inside.startswith(self._home)
        return None if is_free else absolute

    def _shadow(self, absolute: str) -> str:
        return self.folder + absolute.replace('://', os.sep).lstrip(os.sep)

    def has(self, path: Any) -> bool:
        """Whether the script wrote something to a path, or below it."""
        absolute = self._guarded(path)
        return absolute is not None and os.path.lexists(self._shadow(absolute))

    def shadow(self, path: Any) -> Any:
        """Where the script finds what it writes to a path; the path itself if it is not guarded."""
        absolute = self._guarded(path)
        return path if absolute is None else self._shadow(absolute)

    def removed(self, path: Any) -> bool:
        """Whether a removal of a path is already done, because it is a path of the user's."""
        absolute = self._guarded(path)
        if absolute is None or self.has(path):
            return False
        exists = '://' in absolute or os.path.lexists(absolute)
        if exists:
            self.refused[absolute] = None  # it stays, and the script sees that it is gone
        return exists

    def written(self, path: Any) -> Any:
        """The path to write in place of another one."""
        absolute = self._guarded(path)
        if absolute is None:
            return path
        shadow = self._shadow(absolute)
        os.makedirs(os.path.dirname(shadow), exist_ok=True)
        if absolute not in self.refused and os.path.isfile(absolute):
            shutil.copyfile(absolute, shadow)
        self.refused[absolute] = None
        return shadow

    def seen(self, path: Any) -> Any:
        """The path to read in place of another one: what the script wrote, if it did."""
        absolute = self._guarded(path)
        if absolute is None:
            return path
        shadow = self._shadow(absolute)
        return shadow if absolute in self.refused or os.path.lexists(shadow) else path

    # Functions of the standard library.

    def _open(self, original: Any, writes: Callable[[Any], bool]) -> Any:
        @functools.wraps(original)
        def open_(file: Any, how: Any = 'r', *args: Any, **kwargs: Any) -> Any:
            how = kwargs.pop('mode', how) if writes is writes_mode else how
            file = _in_folder(file, kwargs)
            path = self.written(file) if writes(how) else self._newest(file)
            return original(path, how, *args, **kwargs)

        return open_

    def _newest(self, path: Any) -> Any:
        """The path of a file, or of what the script wrote there; folders are as they are."""
        found = self.seen(path)
        return path if found is not path and os.path.isdir(found) else found

    def _at(self, find: Callable[[Any], Any], original: Any) -> Any:
        """A function of a path, at the path that is found for it."""

        @functools.wraps(original)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            path = _in_folder(path, kwargs)
            return original(find(path), *args, **kwargs)

        return call

    def _remove(self, original: Any) -> Any:
        @functools.wraps(original)
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            path = _in_folder(path, kwargs)
            return None if self.removed(path) else original(self.shadow(path), *args, **kwargs)

        return remove

    def _move(self, original: Any) -> Any:
        @functools.wraps(original)
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            source = _in_folder(source, kwargs, 'src_dir_fd')
            target = _in_folder(target, kwargs, 'dst_dir_fd')
            if self._guarded(source) is None and self._guarded(target) is None:
                return original(source, target, *args, **kwargs)
            return original(self.written(source), self.written(target), *args, **kwargs)

        return move

    def _mkdir(self, original: Any) -> Any:
        @functools.wraps(original)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            path = _in_folder(path, kwargs)
            if self._guarded(path) is None or os.path.lexists(path):
                return original(path, *args, **kwargs)
            return original(self.written(path), *args, **kwargs)

        return mkdir

    def _listdir(self, original: Any) -> Any:
        @functools.wraps(original)
        def listdir(path: Any = '.') -> list[Any]:
            with os.scandir(path) as entries:
                return [entry.name for entry in entries]

        return listdir

    def _scandir(self, original: Any) -> Any:
        @functools.wraps(original)
        def scandir(path: Any = '.') -> Any:
            shadow = self.seen(path)
            if shadow is path:
                return original(path)
            absolute = os.path.abspath(os.fsdecode(os.fspath(path)))
            entries = {entry.name: entry for entry in original(shadow)}
            if absolute not in self.refused:
                entries = {entry.name: entry for entry in original(path)} | entries
            return _Entries(iter(entries.values()))

        return scandir


class _Entries:
    """The entries of a folder, as `os.scandir` returns them."""

    def __init__(self, entries: Iterator[Any]):
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass


def _in_folder(path: Any, options: dict[str, Any], name: str = 'dir_fd') -> Any:
    """A path that is relative to an open folder, as a whole path; the folder leaves the options."""
    folder = options.get(name)
    if folder is None or isinstance(path, int):
        return path
    del options[name]
    return os.path.join(_read_link(f'/proc/self/fd/{folder}'), os.fsdecode(path))


def writes_mode(mode: str) -> bool:
    """Whether a mode of `open` writes."""
    return any(letter in mode for letter in 'wax+')


def _writes_flags(flags: int) -> bool:
    return bool(flags & _WRITING_FLAGS)
