"""Claims, the files that say which run holds a folder.

A claim is the file `in-use-<token>.json` in the folder. Its time of modification is the last sign
of life of its run, by the clock of the file system, so the clocks of hosts need not agree. In a
store, where an object is only replaced as a whole, signs of life are the object
`in-use-<token>.alive`, so that a sign of life never brings back a claim that was removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import fsspec
from etils import epath

from partitioning.untrusted_text import parse_json, read_regular_file
from train.paths import is_remote, replacing
from train.processes.signals import handling

_PREFIX, _CLAIM, _ALIVE = 'in-use-', '.json', '.alive'
_MOST_BYTES = 2**16
# How much the times at which a process has begun may differ, where they are not exact, in seconds.
_SAME_TIME = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a folder.

    Attributes:
      machine: differs between boots of a host and between containers, where the same number can
        be another process.
      born: when the process began, in the units of its machine. None if that is unknown.
    """

    host: str
    machine: str
    pid: int
    born: float | None
    command: str = ''

    def __str__(self) -> str:
        here = ' (this process)' if self == this_process() else ''
        command = f' ({self.command})' if self.command else ''
        return f'process {self.pid} on host {self.host}{here}{command}'

    def state(self) -> Literal['alive', 'suspended', 'dead', 'unknown']:
        """Whether the process lives. It is unknown on another machine than the owner's."""
        if self.machine != _machine() or self.host != socket.gethostname():
            return 'unknown'
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 'dead'
        except OSError:  # It is the process of another user.
            pass
        letter, born = _look_at(self.pid)
        if letter is None:
            return 'unknown'
        if letter in 'ZX':
            return 'dead'
        if self.born is not None and born is not None and abs(born - self.born) > _SAME_TIME:
            return 'dead'  # Another process has its number now.
        return 'suspended' if letter in 'Tt' else 'alive'


def this_process() -> Owner:
    """Returns what a claim says of this process."""
    return Owner(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        born=_look_at(os.getpid())[1],
        command=handling.command or '',
    )


def _machine() -> str:
    """A text that differs between boots of this host, and between its containers."""
    found = [sys.platform]
    with contextlib.suppress(OSError):
        found.append(Path('/proc/sys/kernel/random/boot_id').read_text().strip())
        found.append(os.readlink('/proc/self/ns/pid'))
    return ' '.join(found)


def _look_at(pid: int) -> tuple[str | None, float | None]:
    """The state of a process, a letter as `ps` shows it, and when it began.

    On Linux, the beginning is in ticks since the boot, which no change of the clock moves.
    """
    try:
        # The name of the program, in parentheses, may contain anything.
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return fields[0], float(fields[19])
    except (OSError, IndexError):
        pass
    try:
        import psutil

        process = psutil.Process(pid)
        letters = {psutil.STATUS_ZOMBIE: 'Z', psutil.STATUS_DEAD: 'X', psutil.STATUS_STOPPED: 'T'}
        return letters.get(process.status(), 'R'), process.create_time()
    except Exception:  # It is not installed, or may not look.
        return None, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """What a claim says.

    Attributes:
      owner: the process that made it. None if its file cannot be read.
      since: when it was made, in seconds since 1970.
      holds: whether its run holds the folder, or only asks for it.
      place: what tells the folder from its copies, on one machine.
    """

    token: str
    owner: Owner | None
    since: float
    holds: bool
    place: str

    def __str__(self) -> str:
        since = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))
        return f'{self.owner or "an unknown process"}, since {since}'


# The types in the file of a claim, and its largest numbers. Times are in seconds since 1970, which
# are dates until the year 5138, or in ticks since the boot.
_NUMBER = (int, float)
_OF_OWNER = {'host': (str,), 'machine': (str,), 'pid': (int,), 'born': (*_NUMBER, type(None))}
_OF_CLAIM = {'since': _NUMBER, 'holds': (bool,), 'place': (str,)}
_LARGEST = {'pid': 2**31 - 1, 'born': 1e11, 'since': 1e11}


def _checked(found: Any, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """What a file says. Raises a ValueError, KeyError or TypeError if it is not of these types."""
    for name, kind in kinds.items():
        value = found[name]
        is_small = type(value) not in _NUMBER or 0 <= value <= _LARGEST[name]
        if type(value) not in kind or not is_small:
            raise ValueError(f'{name} is {value!r}')
    return {**found, 'command': str(found['command'])} if 'command' in found else found


class ClaimedFolder:
    """The claims in a folder: on a local disk, on a shared file system, or in a store."""

    def __init__(self, folder: epath.Path):
        self.folder = folder
        self._remote = is_remote(folder)
        self._made: list[epath.Path] = []  # the folders that did not exist before

    @property
    def place(self) -> str:
        """What tells this folder from a copy of it, on this machine."""
        return str(self.folder) if self._remote else str(os.stat(self.folder).st_ino)

    def file(self, token: str) -> epath.Path:
        return self.folder / f'{_PREFIX}{token}{_CLAIM}'

    def how_to_remove(self, token: str) -> str:
        """The command that removes a claim, or which object to remove."""
        path = str(self.file(token))
        scheme = path.partition('://')[0]
        tools = {'s3': ['aws', 's3', 'rm'], 'gs': ['gcloud', 'storage', 'rm']}
        return shlex.join([*(tools.get(scheme, ['rm']) if self._remote else ['rm']), path])

    def create(self) -> None:
        """Creates the folder, if it does not exist. Raises an OSError if it cannot be created."""
        if self._remote:
            return
        missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._made = missing

    def write(self, claim: Claim) -> None:
        """Writes a claim, whose file is never half-written."""
        with replacing(self.file(claim.token)) as unfinished:
            unfinished.write_text(json.dumps(dataclasses.asdict(claim), indent=1) + '\n')

    def read(self) -> list[Claim]:
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        tokens = [
            name.removeprefix(_PREFIX).removesuffix(_CLAIM)
            for name in names
            if name.startswith(_PREFIX) and name.endswith(_CLAIM)
        ]
        return [claim for token in sorted(tokens) if (claim := self._read(token)) is not None]

    def _read(self, token: str) -> Claim | None:
        """Returns a claim, or None if it has been removed."""
        try:
            found: Any = parse_json(self._content(token))
            owner = Owner(**_checked(found.pop('owner'), _OF_OWNER))
            return Claim(**{**_checked(found, _OF_CLAIM), 'owner': owner, 'token': token})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            seen = self.last_sign(token)
            if seen is None:
                return None
            return Claim(token=token, owner=None, since=seen, holds=True, place=self.place)

    def _content(self, token: str) -> bytes:
        """The bytes of a claim. Raises a ValueError if something else has its name, as a pipe."""
        if self._remote:
            return self.file(token).read_bytes()
        found = read_regular_file(self.file(token), _MOST_BYTES)
        if found is None:
            raise ValueError('not a file')
        return found[0]

    def give_sign(self, token: str) -> bool:
        """Gives a sign of life. Returns whether the claim is still there.

        Raises an OSError if the folder cannot be used now.
        """
        path = self.file(token)
        try:
            if not self._remote:
                os.utime(path)
                return True
            if not path.exists():
                return False
            self._alive(token).write_text('')
            return True
        except FileNotFoundError:
            return False

    def last_sign(self, token: str) -> float | None:
        """Returns the time of the last sign of life, or None if the claim has been removed."""
        if not self._remote:
            try:
                # A shared file system looks anew at what is opened. Nobody may write to a pipe.
                file = os.open(self.file(token), os.O_RDONLY | os.O_NONBLOCK)
                try:
                    return os.fstat(file).st_mtime
                finally:
                    os.close(file)
            except FileNotFoundError:
                return None
        seen = [self._modified(path) for path in (self.file(token), self._alive(token))]
        return None if seen[0] is None else max(one for one in seen if one is not None)

    def remove(self, token: str) -> None:
        """Removes a claim, if it is there."""
        for path in (self.file(token), self._alive(token)) if self._remote else (self.file(token),):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def remove_folder(self) -> None:
        """Removes the folders that `create` has made, if they are empty."""
        for path in self._made:
            try:
                os.rmdir(path)
            except OSError:
                return

    def _alive(self, token: str) -> epath.Path:
        return self.folder / f'{_PREFIX}{token}{_ALIVE}'

    def _modified(self, path: epath.Path) -> float | None:
        file_system, name = fsspec.core.url_to_fs(str(path))
        try:
            return file_system.modified(name).timestamp()
        except FileNotFoundError:
            return None


def refusal(
    name: str, holder: Claim, files: ClaimedFolder, state: str, age: float | None = None
) -> str:
    """Says in one line that a folder is in use, by whom, and how to take it over.

    `age` is the seconds since its last sign of life, by default by the clock of this machine.
    """
    more = ''
    if state == 'suspended' and holder.owner is not None:
        more = f', suspended (kill -CONT {holder.owner.pid} continues it)'
    if age is None and (sign := files.last_sign(holder.token)) is not None:
        age = time.time() - sign
    sign_of_life = 'unknown' if age is None else ago(age)
    return (
        f'{name} is in use by {holder}, last sign of life {sign_of_life}{more}: wait for it, or '
        'use another folder; if that run is dead, take over with: '
        f'{files.how_to_remove(holder.token)}'
    )


def ago(seconds: float) -> str:
    """Says how long ago something was, such as '3 s ago'."""
    seconds = max(0.0, seconds)
    for unit, size in (('days', 86400), ('hours', 3600), ('min', 60)):
        if seconds >= 2 * size:
            return f'{seconds / size:.0f} {unit} ago'
    return f'{seconds:.0f} s ago'
