"""The connection of each process to the hub: what it sends, and how it ends when the hub says so.

A *tick* is a place in the program that all processes pass equally often, such as the request for
the next batch. A signal to any process stops all of them at the same tick: the hub asks each how
many ticks it has passed, and each waits at its next one until the hub has answered.
"""

from __future__ import annotations

import hmac
import os
import sys
import threading
import time
from typing import Any

from partitioning.untrusted_text import printable
from train.processes import signals
from train.processes.activity import Activity, begin_activity, current_activity, waiting
from train.processes.hub import BEGIN, died, silent
from train.processes.output import print_error
from train.processes.signals import AFTER_CTRL_C, RESTARTABLE, handling, how_to_resume
from train.processes.unanswered import UnansweredConnections
from train.processes.watchdog import end_process
from train.processes.wire import NONCE_BYTES, Connection, Limits, Message

# How long a process that has raised an error may take to print it.
SECONDS_TO_FAIL = 2.0
# How much a process computes between two signs of life if it is busy.
_LEAST_CPU_SECONDS = 0.02
# How long the hub may take to name the cause of an error, and jax to end a process that is done.
SECONDS_FOR_THE_HUB = 3.0


class Member:
    """One process of a run. `stacks` is the folder for its stacks if it is stuck."""

    def __init__(
        self, connection: Connection, index: int, count: int, limits: Limits, secret: bytes
    ):
        self.index, self.count, self.limits, self._secret = index, count, limits, secret
        self._start = current_activity()
        self.stacks: Any = '.'
        self._connection = connection
        self._changed = threading.Condition()
        self._results: dict[int, list[Any]] = {}
        self._gathers = 0
        self._ticks, self._paused = 0, False
        self._stop: tuple[int, int, int] | None = None  # the tick, the signal, and who received it
        self._failed = self._told = self._left = False
        self.all_left = False
        self._code = 0  # the exit code after a failure
        self._place_of_0 = 'the start'  # what process 0 did at its last sign of life

    def start(self) -> None:
        """Begins to send signs of life, and to listen to the hub."""
        threading.Thread(target=self._listen, name='member', daemon=True).start()
        threading.Thread(target=self._beat, name='beat', daemon=True).start()

    def addresses(self) -> tuple[str, str]:
        """The addresses of this process and of process 0 on the channel; empty in process 0."""
        return self._connection.addresses() or ('', '')

    def secret_for(self, purpose: bytes) -> bytes:
        """A secret that all processes share for other connections than the channel's."""
        return hmac.digest(self._secret, purpose, 'sha256')

    def share(self, own: bytes | None) -> bytes | None:
        """Returns the 32 secret bytes that process 0 has, or None. All processes call it together.

        Lines are not encrypted, so the bytes are hidden by a key that only processes of the run
        can derive.
        """
        told = None
        if own is not None:
            nonce = os.urandom(NONCE_BYTES)
            told = [nonce.hex(), self._hide(nonce, own).hex()]
        told = self.gather('sharing a secret', told)[0]
        return told and self._hide(*map(bytes.fromhex, told))

    def _hide(self, nonce: bytes, data: bytes) -> bytes:
        """Hides 32 bytes, or shows what was hidden."""
        key = self.secret_for(b'share' + nonce)
        return bytes(a ^ b for a, b in zip(data, key, strict=True))

    # ---- the calls of the run, in its main thread

    def begin(self, activity: Activity, folder: Any) -> None:
        """Begins a run together with the others. A signal may have stopped an earlier run."""
        begin_activity(activity)
        self.stacks = folder
        with self._changed:
            self._paused, self._stop = False, None
        self.gather(BEGIN, None)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all processes, in the order of their indices.

        All processes must call it in the same order, with the same names, which messages show. The
        hub sends all values, JSON of any kind, to all processes, so they must be small.
        """
        with self._changed:
            self._gathers += 1
            number = self._gathers
        with waiting():
            self._connection.send('gather', number=number, name=name, value=value)
            with self._changed:
                self._changed.wait_for(lambda: number in self._results)
                return self._results.pop(number)

    def tick(self) -> None:
        """Passes a tick: a signal to any process takes effect here, on all of them.

        Raises an Interrupted if a signal stops the run here and the caller can be interrupted.
        """
        with self._changed:
            self._ticks += 1
            if not self._paused:
                return
            self._changed.wait_for(lambda: self._stop is not None)
            assert self._stop is not None
            tick, signum, by = self._stop
            if self._ticks < tick:
                return
        signals.deliver(signum, by)

    def fail(self, line: str, code: int) -> None:
        """Ends the other processes, because this one has raised an error."""
        if self._failed or self._left:
            return
        self._failed, self._code = True, code
        self._connection.send('failed', line=line, code=code)
        with self._changed:  # Process 0 must not end before the others have been told.
            self._changed.wait_for(lambda: self._told, SECONDS_TO_FAIL)

    def leave(self) -> None:
        """Waits until all processes are done, or until the hub ends them.

        A process that has failed ends at once, because jax would wait for the others.
        """
        if self._failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)
        if self._left:
            return
        self._left = True
        current_activity().end_loop()
        self._connection.send('left')
        with self._changed:
            self._changed.wait_for(lambda: self.all_left)

    # ---- the threads

    def forward(self, signum: int, again: bool) -> None:
        """Tells the hub that this process has received a signal."""
        self._connection.send('signal', signum=signum, again=again)

    def _beat(self) -> None:
        signs, since, cpu = -1, time.monotonic(), 0.0
        last, unanswered = since, UnansweredConnections()
        while True:
            now, activity = time.monotonic(), current_activity()
            # A process that was stopped and continues has not been stuck in the meantime.
            since += max(0.0, now - last - 2 * self.limits.beat_seconds)
            last = now
            # While the process starts, it imports and reads its configuration without any sign.
            starts = activity is self._start and time.process_time() - cpu > _LEAST_CPU_SECONDS
            cpu = time.process_time()
            if activity.signs != signs or starts:
                signs, since = activity.signs, now
            # Reading all connections of a host takes time, so short waits do not do it.
            is_patient = activity.is_waiting and now - since > self.limits.heartbeat_seconds / 3
            if not is_patient:
                unanswered = UnansweredConnections()
            self._connection.send(
                'beat',
                place=activity.title,
                quiet=now - since,
                waits=activity.is_waiting,
                compiles=activity.is_compiling,
                unanswered=unanswered.seconds(now) if is_patient else {},
            )
            time.sleep(self.limits.beat_seconds)

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.receive(self.limits.heartbeat_seconds)
            except TimeoutError:
                limit = self.limits.heartbeat_seconds
                line = silent('process 0', self._place_of_0, limit, limit)
                self._end(line, RESTARTABLE, [0])
                return
            if message is None:
                if not self.all_left:
                    self._end(died('process 0', self._place_of_0), RESTARTABLE, [0])
                self._end_if_done()
                return
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if message['kind'] == 'end':
            self._end(**{k: message[k] for k in ('line', 'code', 'causes', 'reason')})
            return
        with self._changed:
            match message['kind']:
                case 'beat':
                    self._place_of_0 = str(message['place'])
                case 'result':
                    self._results[int(message['number'])] = message['values']
                case 'pause':
                    self._paused = True
                    self._connection.send('passed', ticks=self._ticks, saves=signals.saves())
                case 'stop':
                    self._stop = (int(message['tick']), int(message['signum']), int(message['by']))
                case 'all left':
                    self.all_left = True
            self._changed.notify_all()

    def _end_if_done(self) -> None:
        """Ends a command that is done and that jax holds back at its exit.

        jax waits there for process 0, which may have been killed after all of them were done.
        """
        time.sleep(SECONDS_FOR_THE_HUB)
        if handling.final_code is not None:
            signals.end_process(handling.final_code)

    def _end(self, line: str, code: int, causes: list[int], reason: str = '') -> None:
        """Ends this process, whatever its main thread does."""
        if self._failed:  # It prints its own error, and ends with it.
            with self._changed:
                self._told = True
                self._changed.notify_all()
            return
        if self.index in causes and reason == 'stuck':
            end_process(line, self.stacks, self.index)
        # An error that all processes have raised is more useful than the news that one has.
        if reason == 'failed':
            time.sleep(min(SECONDS_TO_FAIL, self.limits.heartbeat_seconds / 3))
            if self._failed:
                return
        is_resumable = code in (RESTARTABLE, AFTER_CTRL_C)
        again = how_to_resume() if is_resumable else ''
        print_error(printable(f'{line}{again}'))
        os._exit(code)
