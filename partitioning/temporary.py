"""Folders for temporary files that nobody has to remove, also after a process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_NOFOLLOW


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder in the system's folder for temporary files, which is removed at the end.

    If this process ends without that, a later call with the same prefix removes it. A locked file
    next to each folder says that its process, or a copy of it, still runs.
    """
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix='.lock')
    lock, folder = Path(name), Path(name.removesuffix('.lock'))
    with open(descriptor) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _remove_left(lock.parent, prefix)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_left(place: Path, prefix: str) -> None:
    """Removes the folders of this user's processes that have ended."""
    for path in place.glob(f'{prefix}*.lock'):
        # It is locked if its process runs, and another process may have removed it meanwhile.
        with contextlib.suppress(OSError), open(os.open(path, _FLAGS)) as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(''), ignore_errors=True)
                path.unlink()
