"""The hub of a run, in process 0: it watches all processes, and ends them when one fails.

Every process, including process 0, has a connection to the hub. The hub ends all of them, with one
line that names the cause, when a process dies, gives no sign of life, fails, or keeps
others waiting. It collects what the processes decide together, and makes them stop at the same tick
after a signal; see `member.py` for ticks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from train.processes.output import enumerated
from train.processes.signals import AT_ONCE, RESTARTABLE, Interrupted
from train.processes.wire import Connection, Limits, Message

# What the processes gather at the start of a run, which forgets the signals of an earlier one.
BEGIN = 'the start of the run'
# How long the end of process 0 waits for the others, which would otherwise take it for a death.
SECONDS_TO_END = 2.0


@dataclasses.dataclass(kw_only=True)
class _Seen:
    """What the hub has seen of a process.

    Attributes:
      name: what messages call it, such as 'process 3 (host b)'.
      silent: the seconds since its last message.
      quiet: the seconds for which it has made no progress, by its own clock.
      unanswered: for how many seconds each address has not answered it.
      passed: the tick that it had passed when the hub asked it to pause, or None.
    """

    connection: Connection
    name: str
    silent: float = 0.0
    place: str = 'the start'
    quiet: float = 0.0
    waits: bool = False
    compiles: bool = False
    unanswered: Mapping[str, float] = dataclasses.field(default_factory=dict)
    passed: int | None = None
    left: bool = False
    closed: bool = False


class Hub:
    """The hub of a run, in process 0."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        hosts: Mapping[int, str],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ):
        several = len(set(hosts.values())) > 1
        self._seen = {
            index: _Seen(
                connection=connections[index],
                name=f'process {index}' + (f' on {hosts[index]}' if several else ''),
            )
            for index in sorted(connections)
        }
        self._limits, self._clock, self._checked = limits, clock, clock()
        self._addresses = _addresses(connections)
        self._lock = threading.RLock()
        self._gathered: dict[int, dict[int, Message]] = {}
        self._signal: tuple[int, int] | None = None  # the signal, and the process that received it
        self._ending = False

    def start(self) -> None:
        """Begins to listen to the processes and to watch them."""
        for index in self._seen:
            threading.Thread(target=self._listen, args=(index,), daemon=True).start()
        threading.Thread(target=self._watch, name='hub', daemon=True).start()

    def _listen(self, index: int) -> None:
        seen = self._seen[index]
        while (message := seen.connection.receive()) is not None:
            with self._lock:
                seen.silent = 0.0
                self.handle(index, message)
        with self._lock:
            seen.closed = True
            if not seen.left:
                self.end(died(seen.name, seen.place), RESTARTABLE, [index])
            self._end_of_all()

    def _watch(self) -> None:
        while not self._ending:
            time.sleep(self._limits.beat_seconds)
            with self._lock:
                self.check()
            for seen in self._seen.values():
                if not seen.closed:
                    seen.connection.send('beat', place=self._seen[0].place)

    # ---- what the processes say

    def handle(self, index: int, message: Message) -> None:
        """Acts on a message of a process."""
        match message['kind']:
            case 'beat':
                seen = self._seen[index]
                seen.place, seen.quiet = str(message['place']), float(message['quiet'])
                seen.waits, seen.compiles = bool(message['waits']), bool(message['compiles'])
                seen.unanswered = dict(message['unanswered'])
            case 'gather':
                self._gather(index, message)
            case 'signal':
                self._stop_for(index, int(message['signum']), bool(message['again']))
            case 'passed':
                self._note_passed(index, message)
            case 'failed':
                self._seen[index].left = True
                line = f'{self._seen[index].name} failed: {message["line"]}'
                self.end(line, int(message['code']), [index], reason='failed')
            case 'left':
                self._seen[index].left = True
                self._end_of_all()
                self._check_waiting()

    def _gather(self, index: int, message: Message) -> None:
        number = int(message['number'])
        found = self._gathered.setdefault(number, {})
        found[index] = message
        self._check_waiting()
        if len(found) < len(self._seen) or self._ending:
            return
        del self._gathered[number]
        names = {i: str(found[i]['name']) for i in sorted(found)}
        if len(set(names.values())) > 1:
            other = next(i for i in names if names[i] != names[0])
            self.end(
                f'the processes do different things: process 0 is at {names[0]!r}, and process '
                f'{other} at {names[other]!r}; start the same command everywhere',
                2,
                [other],
            )
            return
        if names[0] == BEGIN:
            self._signal = None
            for seen in self._seen.values():
                seen.passed = None
        values = [found[i]['value'] for i in sorted(found)]
        for seen in self._seen.values():
            seen.connection.send('result', number=number, values=values)

    def _check_waiting(self) -> None:
        """Ends the run if some processes wait for one that has ended."""
        for found in self._gathered.values():
            gone = [i for i, seen in self._seen.items() if seen.left and i not in found]
            if gone and not self._ending:
                name = next(iter(found.values()))['name']
                others = describe_waiting(list(found))
                self.end(
                    f'{self._seen[gone[0]].name} has ended, and {others} for it at {name!r}',
                    RESTARTABLE,
                    gone,
                )

    # ---- signals

    def _stop_for(self, index: int, signum: int, again: bool) -> None:
        if again:
            self._interrupt(Interrupted(signum, AT_ONCE, by=index))
        elif self._signal is None:
            self._signal = (signum, index)
            for seen in self._seen.values():
                seen.connection.send('pause')

    def _note_passed(self, index: int, message: Message) -> None:
        """Decides where all processes stop, when all have said how far they are."""
        assert self._signal is not None
        signum, by = self._signal
        if not message['saves']:
            self._interrupt(Interrupted(signum, by=by))
            return
        self._seen[index].passed = int(message['ticks'])
        passed = [seen.passed for seen in self._seen.values() if not seen.left]
        known = [ticks for ticks in passed if ticks is not None]
        if len(known) == len(passed):
            for seen in self._seen.values():
                seen.connection.send('stop', tick=max(known) + 1, signum=signum, by=by)

    def _interrupt(self, reason: Interrupted) -> None:
        self.end(str(reason), reason.exit_code, [])

    # ---- what the clock says

    def check(self) -> None:
        """Ends the run if a process is silent, or keeps others waiting, for too long."""
        now = self._clock()
        # If this process itself was stopped for a time, the others were not silent for it.
        passed = min(now - self._checked, 2 * self._limits.beat_seconds)
        self._checked = now
        present = {i: seen for i, seen in self._seen.items() if not seen.left}
        for index, seen in present.items():
            seen.silent += passed
            limit = self._limits.heartbeat_seconds
            if seen.silent > limit:
                line = silent(seen.name, seen.place, seen.silent, limit)
                self.end(line, RESTARTABLE, [index])
                return
        if self._check_network(present):
            return
        limit = self._limits.watchdog_seconds
        patient = [i for i, seen in present.items() if seen.waits]
        is_late = any(present[i].quiet >= limit for i in patient)
        stuck = [
            i
            for i, seen in present.items()
            if not seen.waits and not seen.compiles and seen.quiet >= limit
        ]
        if is_late and stuck:
            one = present[stuck[0]]
            places = enumerated([f'{present[i].name} at {present[i].place!r}' for i in stuck])
            self.end(
                f'stuck: {places} {"has" if len(stuck) == 1 else "have"} made no progress for '
                f'{one.quiet:,.0f} s, and {describe_waiting(patient)} for it '
                f'(--watchdog_seconds={limit:g}: raise it if this is normal)',
                RESTARTABLE,
                stuck,
                reason='stuck',
            )

    def _check_network(self, present: Mapping[int, _Seen]) -> bool:
        """Ends the run if a process that waits gets no answer from another one for too long."""
        limit = self._limits.heartbeat_seconds
        for index, seen in present.items():
            for address, seconds in seen.unanswered.items():
                others = [i for i in self._addresses.get(address, ()) if i in present]
                if others and seen.quiet > limit and seconds > limit / 2:
                    line = no_answer(seen.name, present[others[0]].name, seconds, limit)
                    self.end(line, RESTARTABLE, [index, others[0]])
                    return True
        return False

    # ---- the end

    def end(self, line: str, code: int, causes: list[int], reason: str = '') -> None:
        """Ends all processes, once.

        Args:
          causes: the processes that are the cause.
          reason: 'stuck' if the causes must leave their stacks, 'failed' if the others may have
            failed in the same way and print it themselves.
        """
        if self._ending:
            return
        self._ending = True
        message = {'line': line, 'code': code, 'causes': causes, 'reason': reason}
        for index, seen in self._seen.items():
            if index != 0:
                seen.connection.send('end', **message)
        if reason == 'failed':  # All of them wait a little, so the others have read it by then.
            self._seen[0].connection.send('end', **message)
        else:
            threading.Thread(target=self._end_own, args=(message,), daemon=True).start()

    def _end_own(self, message: Message) -> None:
        """Ends process 0 after the others have received why, because its end closes everything."""
        deadline = time.monotonic() + SECONDS_TO_END
        others = [s for index, s in self._seen.items() if index not in (0, *message['causes'])]
        while time.monotonic() < deadline and not all(other.closed for other in others):
            time.sleep(0.01)
        self._seen[0].connection.send('end', **message)

    def _end_of_all(self) -> None:
        """Tells the processes when all of them have said that they end."""
        if all(seen.left for seen in self._seen.values()):
            # Process 0 is last: it ends when it hears this, and the hub with it.
            for index in reversed(self._seen):
                self._seen[index].connection.send('all left')


# ---- what messages say


def died(name: str, place: str) -> str:
    """Says that a process has died, and what it did at its last sign of life."""
    return f'{name} died, last seen at {place!r}'


def silent(name: str, place: str, seconds: float, limit: float) -> str:
    """Says that a process gives no sign of life, and what it did at the last one, `seconds` ago."""
    return (
        f'{name} has given no sign of life for {seconds:,.0f} s, since it was at {place!r}: it is '
        f'stopped, or its host or network has failed (--heartbeat_seconds={limit:g})'
    )


def no_answer(name: str, other: str, seconds: float, limit: float) -> str:
    """Says that one process gets no answer from another one."""
    return (
        f'{name} has had no answer from {other} for {seconds:,.0f} s, although both give signs of '
        f'life: the network between them has failed (--heartbeat_seconds={limit:g})'
    )


def _addresses(connections: Mapping[int, Connection]) -> dict[str, list[int]]:
    """The processes at each address. Process 0 is where the others reach it."""
    found: dict[str, list[int]] = {}
    for index, connection in sorted(connections.items()):
        if ends := connection.addresses():
            own, other = ends
            found.setdefault(other, []).append(index)
            if 0 not in found.setdefault(own, []):
                found[own].insert(0, 0)
    return found


def describe_waiting(indices: Sequence[int]) -> str:
    """Says that processes wait, as in 'process 3 waits' or 'processes 0, 1 and 3 wait'."""
    if len(indices) == 1:
        return f'process {indices[0]} waits'
    few = sorted(indices)[:8]
    more = f' and {len(indices) - len(few)} more' if len(indices) > len(few) else ''
    return f'processes {enumerated(list(map(str, few)))}{more} wait'
