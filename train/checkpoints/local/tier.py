"""The local tier of checkpoints: every few steps, in the memory or on the disks of the hosts.

Each process keeps its part of the state in the local folder of its host, and its partner, on
another host, keeps a copy. So a step stays whole after the loss of one host, and the run resumes
from it within seconds instead of from an older step in MODEL_DIR.

All processes begin a local step together, in the training loop, and copy their shards to memory.
The rest happens in a thread of each process: it writes its own part, and then copies the part of
its partner. The step before is deleted only when all processes have the next one complete.

A file in MODEL_DIR lists the starts of the run. Every start writes under a new random name. Local
steps beyond the step from which a later start began belong to a past that was given up.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from partitioning.untrusted_text import parse_json
from train.checkpoints.config import CheckpointConfig
from train.checkpoints.local.exchange import Saved, answers, copy_from
from train.checkpoints.local.held import HeldParts
from train.checkpoints.local.parts import (
    ArrayIndex,
    Key,
    copy_shards,
    part_bytes,
    plan_part,
    write_part,
)
from train.checkpoints.local.reading import LocalSteps
from train.errors import ConfigError, describe_error, os_errors_as
from train.paths import absolute, as_folder, replacing
from train.processes.activity import awaiting_threads
from train.processes.output import enumerated, print_error
from train.processes.peers import Peers
from train.processes.together import agree_on, gather, raise_on_all_processes

FILE = 'local-checkpoints.json'  # the starts of the run, in MODEL_DIR
_SETTING = 'CheckpointConfig.local_dir'
_MOST_STARTS = 50


class Start(NamedTuple):
    """A start of the run: its name, and the last finished step from which it began."""

    name: str
    step: int


class LocalTier:
    """The local checkpoints of a run. All processes open it together, in their main threads.

    Attributes:
      steps: the local checkpoints that the run can start from.

    Raises:
      ConfigError: if the folder cannot be used, or there is only one process to begin with.
    """

    def __init__(self, config: CheckpointConfig, model_dir: epath.Path, say: Callable[[str], None]):
        assert config.local_dir is not None
        self._me, self._count = jax.process_index(), jax.process_count()
        self._every, self._say, self._file = config.local_every, say, model_dir / FILE
        self._directory = absolute(as_folder(_SETTING, config.local_dir))
        self._starts: list[Start] = agree_on(self._read_starts())
        self._starts = [Start(*start) for start in self._starts]
        self._check_folder(model_dir)
        self._peers: Peers | None = None
        hosts = ['']
        if self._count > 1:
            self._peers = Peers(lambda *request: self._answer(*request))
            hosts = list(self._peers.hosts)
            self._check_separate(hosts)
        elif not self._starts:
            raise ConfigError(
                f'{_SETTING} keeps each part of a checkpoint on two hosts, and this run has one '
                'process: start several, or remove local_dir and local_every'
            )
        else:
            say('one process: no local checkpoints are saved, because each needs two hosts')
        me, slots = self._me, slots_of(hosts)
        self._guests = [i for i, one in enumerate(partners_of(hosts)) if one == me]
        self._saved = Saved()
        self._held = HeldParts(self._directory, slots[me], hosts.count(hosts[me]))
        self._answer = answers(self._held, self._saved)
        self.steps = self._find_steps()
        if len(hosts) > 1 and len(set(hosts)) == 1:
            say(f'{_SETTING}: all processes are on one host, so local checkpoints end with it')
        self._index: Mapping[str, ArrayIndex] | None = None
        self._buffer = np.empty(0, np.uint8)
        self._writing: threading.Thread | None = None
        self._complete: tuple[str, int] | None = None  # the newest step that all processes have
        self._done = -1  # the newest step of this start that this process has
        self._told = set[str]()  # what was said, so that it is said once

    # ---- the start

    def _read_starts(self) -> list[Start]:
        """The starts of the run so far, in process 0."""
        if self._me != 0 or not self._file.exists():
            return []
        try:
            found = parse_json(self._file.read_text())
            return [Start(str(name), int(step)) for name, step in found['starts']]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f'{self._file} is damaged ({error}): remove it') from error

    def _check_folder(self, model_dir: epath.Path) -> None:
        """Checks that the folder can be written, and is not a part of MODEL_DIR."""
        with raise_on_all_processes('checking the local folder'):
            if absolute(model_dir) in (self._directory, *self._directory.parents):
                raise ConfigError(
                    f'{_SETTING} {self._directory} is in MODEL_DIR {model_dir}, which all hosts '
                    'share: use a folder on a disk of each host, or in its memory (/dev/shm)'
                )
            with os_errors_as(f'{_SETTING} {self._directory} cannot be written:'):
                self._directory.mkdir(parents=True, exist_ok=True)
                probe = self._directory / f'.probe-{secrets.token_hex(4)}'
                probe.mkdir()
                probe.rmdir()

    def _check_separate(self, hosts: Sequence[str]) -> None:
        """Checks that no two hosts share the folder: each looks for a file of the others."""
        if len(set(hosts)) == 1:
            return
        mark = self._directory / f'.host-{secrets.token_hex(8)}'
        try:
            mark.write_text('')
            marks = gather('the local folders', mark.name)
            with raise_on_all_processes('comparing the local folders'):
                own = hosts[self._me]
                for host, name in zip(hosts, marks, strict=True):
                    if host != own and (self._directory / name).exists():
                        raise ConfigError(
                            f'{_SETTING} {self._directory} is the same folder on '
                            f'{enumerated(sorted((host, own)))}: use a disk of each host, or its '
                            'memory (/dev/shm)'
                        )
        finally:
            mark.unlink(missing_ok=True)

    def _find_steps(self) -> LocalSteps:
        """Finds out which process has which part of the steps that are not given up."""
        limits, limit = dict[str, float](), float('inf')
        for start in reversed(self._starts):
            limits[start.name], limit = limit, min(limit, start.step)
        self._held.find(limits, print_error)
        own = [list(key) for key in self._held.all() if key.step <= limits[key.start]]
        holders = defaultdict[Key, list[int]](list)
        for process, keys in enumerate(gather('the parts of local checkpoints', own)):
            for key in keys:
                holders[Key(*key)].append(process)
        names = [start.name for start in self._starts]
        return LocalSteps(self._directory, self._me, self._held, self._peers, names, holders)

    def begin(self, step: int, *, is_local: bool) -> None:
        """Notes in MODEL_DIR that the run starts from a step, before anything is saved."""
        self._complete = (self.steps.chosen.start, step) if is_local else None
        self.steps.close()
        start = Start(*agree_on(Start(secrets.token_hex(4), step)))
        self._starts = [*self._starts, start][-_MOST_STARTS:]
        with raise_on_all_processes('noting the start of the run'):
            if self._me == 0:
                with os_errors_as(f'{self._file} cannot be written:'), replacing(self._file) as new:
                    new.write_text(json.dumps({'starts': self._starts}) + '\n')

    # ---- while the run trains

    def is_due(self, step: int) -> bool:
        """Whether a local checkpoint is to be saved after this step. All processes call it.

        If a process has not finished an earlier one, this one is left out.
        """
        if self._peers is None or step % self._every:
            return False
        is_busy = self._writing is not None and self._writing.is_alive()
        found = gather('the local checkpoints', [is_busy, self._done])
        done = {one for _, one in found}
        if len(done) == 1 and self._done >= 0:
            self._complete = (self._starts[-1].name, self._done)
        if busy := [process for process, (is_busy, _) in enumerate(found) if is_busy]:
            if 'busy' not in self._told:
                self._say(
                    f'process {busy[0]} is still writing an earlier local checkpoint, so there is '
                    f'none of step {step}: raise CheckpointConfig.local_every, now {self._every}'
                )
            self._told.add('busy')
        return not busy

    def save(self, step: int, state: Any) -> None:
        """Copies the part of this process to its memory, and begins to write it."""
        if self._index is None:
            self._index = plan_part(state, self._me)
            self._buffer = np.empty(part_bytes(self._index), np.uint8)
        copy_shards(state, self._index, self._buffer)
        self._writing = threading.Thread(target=self._write, args=(step,), daemon=True)
        self._writing.start()

    def _write(self, step: int) -> None:
        """Writes the part of this process, and then copies the parts for which it is a partner."""
        me, count, start = self._me, self._count, self._starts[-1].name
        own = self._attempt(step, lambda: self._write_own(Key(start, step, me, count)))
        self._saved.note(step, own)
        copied = [
            self._attempt(step, functools.partial(self._copy, Key(start, step, guest, count)))
            for guest in self._guests
        ]
        if own and all(copied):
            self._done = step

    def _copy(self, key: Key) -> bool:
        """Copies the part of another process. Returns whether that process could write it."""
        assert self._peers is not None
        return copy_from(self._peers, key.part, key, self._held)

    def _write_own(self, key: Key) -> bool:
        assert self._index is not None
        kept = () if self._complete is None else (self._complete,)
        self._held.delete_others([start.name for start in self._starts], kept, key.start)
        folder = self._held.prepare(key)
        try:
            write_part(folder, key, self._index, self._buffer)
        except BaseException:
            self._held.abandon(folder)
            raise
        self._held.complete(key, folder)
        return True

    def _attempt(self, step: int, work: Callable[[], bool]) -> bool:
        """Does something for a local step. If it fails, it says so, and training continues."""
        try:
            return work()
        except Exception as error:  # No error of this tier may end the training.
            reason = describe_error(error)
            if reason not in self._told:
                self._told.add(reason)
                print_error(
                    f'the local checkpoint of step {step} cannot be kept in {self._directory} '
                    f'({reason}): training continues'
                )
            return False

    # ---- the end

    def finish(self, saved_step: int | None) -> None:
        """Ends the tier after the last step. All processes call it together.

        The local checkpoints are deleted if MODEL_DIR has one of the same or a later step. The
        newest step of MODEL_DIR, `saved_step`, is taken from process 0, which completes it.
        """
        self.wait()
        found = gather('the last local checkpoint', [saved_step, self._done])
        newest_saved = found[0][0]
        if newest_saved is not None and newest_saved >= max(done for _, done in found):
            self._attempt(newest_saved, self._delete_all)

    def _delete_all(self) -> bool:
        self._held.delete_others([start.name for start in self._starts], ())
        return True

    def wait(self) -> None:
        """Waits until this process has written what it has begun."""
        if self._writing is not None:
            with awaiting_threads():
                self._writing.join()

    def close(self) -> None:
        """Ends the connections to other processes."""
        if self._peers is not None:
            self._peers.close()


def groups_of(hosts: Sequence[str]) -> list[list[int]]:
    """The processes of each host, in the order in which the hosts appear."""
    found = defaultdict[str, list[int]](list)
    for process, host in enumerate(hosts):
        found[host].append(process)
    return list(found.values())


def slots_of(hosts: Sequence[str]) -> list[int]:
    """The number of each process among the processes of its host."""
    numbers = {process: n for group in groups_of(hosts) for n, process in enumerate(group)}
    return [numbers[process] for process in range(len(hosts))]


def partners_of(hosts: Sequence[str]) -> list[int]:
    """The process that keeps a copy for each process: on the next host if there are several."""
    groups = groups_of(hosts)
    if len(groups) == 1:
        return [(process + 1) % len(hosts) for process in range(len(hosts))]
    after = groups[1:] + groups[:1]
    found = {
        process: others[number % len(others)]
        for group, others in zip(groups, after, strict=True)
        for number, process in enumerate(group)
    }
    return [found[process] for process in range(len(hosts))]
