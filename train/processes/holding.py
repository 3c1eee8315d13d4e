"""Holding a folder: no two runs write to the same one, and a run that was killed blocks nobody.

A run writes a claim, and then reads the claims of others, so of two runs that begin at once, at
least one sees the other. It holds the folder if no other living run claims it. A run on this
machine is dead if its process is; a run on another one, if it has given no sign of life for
`SECONDS_UNTIL_DEAD`. What a run reads needs no claim, so a running folder can be evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
from etils import epath

from partitioning.untrusted_text import printable
from train.errors import ConfigError, os_errors_as
from train.paths import absolute, as_folder
from train.processes.activity import current_activity
from train.processes.claims import Claim, ClaimedFolder, Owner, ago, refusal, this_process
from train.processes.output import print_error
from train.processes.signals import handling
from train.processes.together import end_all_processes, raise_on_all_processes

# How often a run gives a sign of life, and after how long without one it is dead.
SECONDS_BETWEEN_SIGNS, SECONDS_UNTIL_DEAD = 10.0, 60.0


class FolderInUse(ConfigError):
    """Another run holds the folder."""


class FolderLost(ConfigError):
    """Another run has taken over the folder of this one, which must not write any more."""


def _now() -> float:
    """Seconds on a clock that goes on while the process or its machine is suspended."""
    clock = getattr(time, 'CLOCK_BOOTTIME', None)  # on Linux
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclasses.dataclass(frozen=True)
class Timing:
    """The clock by which a run judges the signs of life of others, and waits for them."""

    now: Callable[[], float] = _now
    sleep: Callable[[float], None] = time.sleep


@contextlib.contextmanager
def hold_folder(
    setting: str,
    folder: str | os.PathLike[str],
    say: Callable[[str], None],
    *,
    owner: Owner | None = None,
    timing: Timing | None = None,
) -> Iterator[Holding | None]:
    """Holds a folder in a context. All processes of a run enter it together; process 0 holds it.

    The folder is created if it does not exist, and removed if it stays empty. Yields what says
    whether it is still held, or None in processes other than 0. Raises a FolderInUse if another
    run holds it, and a ConfigError if it cannot be written.
    """
    held: Holding | None = None
    try:
        with raise_on_all_processes(f'taking {setting}'):
            if jax.process_index() == 0:
                path = as_folder(setting, folder)
                held = Holding(setting, path, owner or this_process(), timing or Timing())
                with os_errors_as(f'{setting} {path} cannot be written:'):
                    held.take(say)
        yield held
    finally:
        if held is not None:
            held.release()


class Holding:
    """A folder that this run holds."""

    def __init__(self, setting: str, folder: epath.Path, owner: Owner, timing: Timing):
        self._name, self._timing, self._owner = f'{setting} {folder}', timing, owner
        self._files = ClaimedFolder(absolute(folder))
        self._token = secrets.token_hex(4)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._signed = timing.now()  # when the claim was last seen
        self._lost: FolderLost | None = None

    # ---- the beginning

    def take(self, say: Callable[[str], None]) -> None:
        """Takes the folder, from runs that are dead if necessary.

        Raises a FolderInUse if another run holds it, and an OSError if it cannot be written.
        """
        self._files.create()
        own = Claim(
            token=self._token,
            owner=self._owner,
            since=time.time(),
            holds=False,
            place=self._files.place,
        )
        self._files.write(own)
        self._signed = self._timing.now()
        threading.Thread(target=self._give_signs, name='holding', daemon=True).start()
        # The clock of the file system, by which it gives times to files.
        offset = (self._files.last_sign(self._token) or time.time()) - self._signed
        first = self._timing.now()
        while others := [one for one in self._files.read() if one.token != self._token]:
            for one in others:
                self._settle(one, offset, say)
            if self._timing.now() - first > 2 * SECONDS_UNTIL_DEAD:
                self._refuse(others[0], offset, 'it is starting, too')
        self._files.write(dataclasses.replace(own, holds=True))

    def _settle(self, other: Claim, offset: float, say: Callable[[str], None]) -> None:
        """Removes the claim of a run that is dead, refuses to start, or waits for a while."""
        state = self._judge(other, offset, say)
        if state == 'gone':
            return
        if state == 'dead':
            age = self._age(other, offset)
            self._files.remove(other.token)
            if other.holds and age is not None:
                say(
                    f'taking over {self._name} from {other}, which has ended without giving it '
                    f'back (last sign of life {ago(age)})'
                )
        elif other.holds or other.token < self._token:
            self._refuse(other, offset, state)
        else:  # Both ask at the same time. The other one sees this claim, and gives way.
            self._timing.sleep(0.1)

    def _judge(self, other: Claim, offset: float, say: Callable[[str], None]) -> str:
        """Returns 'alive', 'suspended', 'dead', or 'gone' if the claim has been removed meanwhile.

        A run on another machine is watched until it gives a sign of life, or none for so long that
        it is dead.
        """
        state = 'unknown' if other.owner is None else other.owner.state()
        if state in ('alive', 'suspended') and other.place != self._files.place:
            return 'dead'  # This folder is a copy of the one that the process holds.
        if state != 'unknown':
            return state
        told, began = False, self._timing.now()
        first = sign = self._files.last_sign(other.token)
        while sign is not None and first is not None:
            # A sign may be dated in the future, where a clock was wrong or a copy kept the time.
            age = max(self._timing.now() + offset - sign, self._timing.now() - began)
            if sign != first:
                return 'alive'
            if age >= SECONDS_UNTIL_DEAD:
                return 'dead'
            if not told:
                told = True
                say(
                    f'{self._name} is claimed by {other}, last sign of life {ago(age)}: waiting '
                    f'for the next one, for at most {SECONDS_UNTIL_DEAD - age:.0f} s'
                )
            current_activity().progress()
            self._timing.sleep(1.0)
            sign = self._files.last_sign(other.token)
        return 'gone'

    def _age(self, other: Claim, offset: float) -> float | None:
        """The seconds since its last sign of life, or None if its claim has been removed."""
        sign = self._files.last_sign(other.token)
        return None if sign is None else self._timing.now() + offset - sign

    def _refuse(self, other: Claim, offset: float, state: str) -> NoReturn:
        age = self._age(other, offset)
        message = refusal(self._name, other, self._files, state, age)
        self.release()
        raise FolderInUse(message)

    # ---- while it is held

    def check(self) -> None:
        """Checks that the folder is still held, before something is written to it.

        Raises a FolderLost if another run has taken it over while this one was suspended. A
        command, or a run of several processes, ends here.
        """
        if self._lost is None and self._timing.now() - self._signed > 2 * SECONDS_BETWEEN_SIGNS:
            self._sign()
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Gives the folder back. Nothing is raised if that fails."""
        with self._lock:
            if not self._end.is_set():
                self._end.set()
                with contextlib.suppress(OSError):
                    self._files.remove(self._token)
                    self._files.remove_folder()

    def _give_signs(self) -> None:
        while not self._end.wait(SECONDS_BETWEEN_SIGNS) and self._lost is None:
            self._sign()

    def _sign(self) -> None:
        """Gives a sign of life. If the claim has been removed, the folder is lost."""
        with self._lock:
            if self._end.is_set() or self._lost is not None:
                return
            try:
                if self._files.give_sign(self._token):
                    self._signed = self._timing.now()
                    return
                others = self._files.read()
            except OSError:  # The storage does not answer; what is written next says so.
                return
            by = f' by {others[0]}' if others else ''
            error = FolderLost(
                f'{self._name} was taken over{by}: {self._files.file(self._token)} is gone, so '
                'this run ends without writing anything more'
            )
            self._lost = error
        end_all_processes(error)
        if handling.watched:
            print_error(f'error: {printable(str(error))}')
            os._exit(2)
