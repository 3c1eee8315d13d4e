"""Reads local checkpoints: each shard from this process, or from another one that has its part."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from train.checkpoints.arrays.stored import Bounds, StoredArray, bounds_of
from train.checkpoints.local.exchange import read_from
from train.checkpoints.local.held import HeldParts
from train.checkpoints.local.parts import (
    INDEX,
    SHARDS,
    ArrayIndex,
    Index,
    Key,
    Shard,
    parse_index,
)
from train.checkpoints.matching import Wanted
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps import manifest
from train.checkpoints.steps.manifest import DamagedCheckpoint, FileRecord, parse_manifest
from train.errors import ConfigError, describe_error
from train.processes.output import enumerated, print_error
from train.processes.peers import Peers

_CACHE_BYTES = 2**28  # of shards that several pieces need
_MOST_NAMED = 8


class WholeStep(NamedTuple):
    """A step of which every part is somewhere. A later start of the run has a higher number."""

    step: int
    number: int
    start: str
    of: int

    def key(self, part: int) -> Key:
        """The key of one of its parts."""
        return Key(self.start, self.step, part, self.of)


class LocalSteps(CheckpointReader):
    """The local checkpoints of a run. All processes find the same ones.

    Args:
      directory: the local folder, for messages.
      process: the index of this process.
      held: the parts that this process has.
      peers: the other processes, or None if this one is alone.
      starts: the starts of the run, in their order.
      holders: the processes that have each part.
    """

    def __init__(
        self,
        directory: epath.Path,
        process: int,
        held: HeldParts,
        peers: Peers | None,
        starts: Sequence[str],
        holders: Mapping[Key, Sequence[int]],
    ):
        self.directory, self._restore, self._process = directory, None, process
        self._held, self._peers, self._holders = held, peers, holders
        self._whole = find_whole(starts, holders)
        self._chosen: WholeStep | None = None
        self._indices, self._lock = dict[int, Index](), threading.Lock()
        self._told = set[tuple[int, int]]()  # the parts and processes of which damage was told
        self._cache, self._cached_bytes = dict[tuple[int, int], Any](), 0  # the oldest first

    def newest_step(self, say: Callable[[str], None], below: int | None = None) -> int | None:
        """Chooses the newest whole step, or the next older one after it turned out damaged."""
        if below is not None and self._chosen is not None:
            self._whole.remove(self._chosen)
        self._chosen = max(self._whole, default=None)
        self._forget()
        return self.chosen_step

    @property
    def chosen_step(self) -> int | None:
        """The step of the newest whole step that is not damaged, as far as is known."""
        return None if self._chosen is None else self._chosen.step

    def path(self, step: int) -> epath.Path:
        """Where the parts of the chosen step are, on every host."""
        return self.directory / self.chosen.start

    def origin(self, step: int) -> str:
        """What is restored, and from which process each part comes."""
        return f'step {step} of the local checkpoints in {self.directory}: {self.describe()}'

    def describe(self) -> str:
        """Says from which processes the parts of the chosen step come."""
        whole, count = self.chosen, self._count
        sources = {part: self._sources(part, part)[0] for part in range(whole.of)}
        foreign = collections.defaultdict[int, list[int]](list)
        for part, source in sources.items():
            if part != source or count != whole.of:
                foreign[source].append(part)
        if not foreign:
            return f'all {whole.of} parts from their own processes'
        told = [
            f'part{"s" * (len(parts) > 1)} {_listed(parts)} from process {source}'
            for source, parts in list(foreign.items())[:_MOST_NAMED]
        ]
        told += ['...'] * (len(foreign) > _MOST_NAMED)
        rest = whole.of - sum(map(len, foreign.values()))
        told += [f'{rest} from {"its" if rest == 1 else "their"} own'] * bool(rest)
        return f'{whole.of} parts, {", ".join(told)}'

    def arrays(self, step: int, wanted: Wanted) -> dict[str, StoredArray]:
        """The arrays of the chosen step, whose shards are read when they are needed."""
        index = self._index(self._first_part())
        return {
            name: StoredArray(
                shape=array.shape, dtype=array.dtype, chunk=array.chunk, start=self._reader(name)
            )
            for name, array in index.items()
        }

    def has_checksums(self, step: int) -> bool:
        """The index of a part has the checksum of each shard."""
        return True

    def close(self) -> None:
        """Ends reading: later steps of the run replace these ones."""
        self._whole, self._chosen = [], None
        self._forget()

    def _forget(self) -> None:
        self._indices, self._cache, self._cached_bytes = {}, {}, 0

    @property
    def chosen(self) -> WholeStep:
        """The step that is restored."""
        assert self._chosen is not None
        return self._chosen

    @property
    def _count(self) -> int:
        return 1 if self._peers is None else len(self._peers.hosts)

    def _check_description(self, step: int) -> None:
        """Every index is checked when it is read."""

    def _first_part(self) -> int:
        """The part that this process has written if nothing has changed."""
        return self._process % self.chosen.of

    def _sources(self, part: int, process: int) -> list[int]:
        """The processes that have a part, in the order in which a process asks them."""
        holders = self._holders[self.chosen.key(part)]
        return sorted(holders, key=lambda holder: (holder != process, holder != part, holder))

    # ---- reading

    def _reader(self, name: str) -> Callable[[Any], Any]:
        def start(index: Any) -> Future[np.ndarray]:
            future: Future[np.ndarray] = Future()
            future.set_result(self._read(name, index))
            return future

        return start

    def _read(self, name: str, index: Any) -> np.ndarray:
        """Reads a slice of an array from the shards that have a part of it."""
        about = self._index(self._first_part())[name]
        wanted = bounds_of(index, about.shape)
        shards = list(_shards_of(about, wanted))
        if shards == [wanted]:
            return self._read_shard(name, wanted)
        out = np.empty([last - first for first, last in wanted], about.dtype)
        for shard in shards:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, shard, strict=True)]
            values = self._read_shard(name, shard)
            out[_within(common, wanted)] = values[_within(common, shard)]
        return out

    def _read_shard(self, name: str, bounds: Bounds) -> np.ndarray:
        first, of = self._first_part(), self.chosen.of
        for part in (first, *(other for other in range(of) if other != first)):
            array = self._index(part)[name]
            if shard := array.shards.get(bounds):
                data = self._bytes_of(part, shard, array.shard_bytes)
                return np.frombuffer(data, array.dtype).reshape(array.chunk)
        raise DamagedCheckpoint(f'{name} {bounds} is in no part of local step {self.chosen.step}')

    def _bytes_of(self, part: int, shard: Shard, size: int) -> Any:
        place = part, shard.offset
        with self._lock:
            if (data := self._cache.get(place)) is not None:
                return data
        data = self._try_all(part, lambda holder: self._checked(holder, part, shard, size))
        with self._lock:
            if place not in self._cache:
                self._cache[place] = data
                self._cached_bytes += len(data)
            while self._cached_bytes > _CACHE_BYTES:
                self._cached_bytes -= len(self._cache.pop(next(iter(self._cache))))
        return data

    def _checked(self, holder: int, part: int, shard: Shard, size: int) -> Any:
        data = self._from(holder, part, SHARDS, shard.offset, size)
        if FileRecord.of(data).checksum != shard.checksum:
            raise ConfigError(f'{SHARDS} does not have the content that was written')
        return data

    def _index(self, part: int) -> Index:
        with self._lock:
            if part not in self._indices:
                self._indices[part] = self._try_all(part, lambda h: self._read_index(h, part))
            return self._indices[part]

    def _read_index(self, holder: int, part: int) -> Index:
        about = parse_manifest(self._from(holder, part, manifest.FILE).decode(), 'of a part')
        data = self._from(holder, part, INDEX)
        if about.files.get(INDEX) != FileRecord.of(data):
            raise ConfigError(f'{INDEX} does not have the content that was written')
        return parse_index(data.decode(), self.chosen.key(part))

    def _from(
        self, holder: int, part: int, name: str, first: int = 0, size: int | None = None
    ) -> bytes | bytearray:
        """Reads a file of a part, or some bytes of it, here or from another process."""
        key = self.chosen.key(part)
        if holder == self._process:
            folder = self._held.folder(key)
            assert folder is not None
            with (folder / name).open('rb') as file:
                file.seek(first)
                return bytes(file.read(-1 if size is None else size))
        assert self._peers is not None
        return read_from(self._peers, holder, key, name, first, size)

    def _try_all(self, part: int, read: Callable[[int], Any]) -> Any:
        """Reads from each process that has a part, until one has it undamaged."""
        problems = []
        for holder in self._sources(part, self._process):
            try:
                return read(holder)
            except (OSError, ValueError) as error:
                problems.append(f'process {holder}: {describe_error(error)}')
                if (part, holder) not in self._told:
                    self._told.add((part, holder))
                    where = f'part {part} of local step {self.chosen.step}'
                    print_error(f'{where} cannot be read on {problems[-1]}')
        raise DamagedCheckpoint(
            f'part {part} of local step {self.chosen.step} is damaged ({"; ".join(problems)})'
        )


def find_whole(starts: Sequence[str], holders: Collection[Key]) -> list[WholeStep]:
    """The steps of which every part is somewhere. Parts of different starts are never mixed."""
    numbers = {start: number for number, start in enumerate(starts)}
    found = {
        WholeStep(key.step, numbers[key.start], key.start, key.of)
        for key in holders
        if key.start in numbers
    }
    return sorted(one for one in found if all(one.key(part) in holders for part in range(one.of)))


def _shards_of(array: ArrayIndex, wanted: Bounds) -> Any:
    """The bounds of the shards that have a part of a slice."""
    ranges = [
        [(at, at + size) for at in range(first // size * size, last, size)] if size else []
        for (first, last), size in zip(wanted, array.chunk, strict=True)
    ]
    return itertools.product(*ranges)


def _within(bounds: Sequence[tuple[int, int]], outer: Bounds) -> tuple[Any, ...]:
    pairs = zip(bounds, outer, strict=True)
    return (*(slice(first - start, last - start) for (first, last), (start, _) in pairs), ...)


def _listed(parts: Sequence[int]) -> str:
    if len(parts) <= _MOST_NAMED:
        return enumerated([str(part) for part in parts])
    return f'{", ".join(map(str, parts[:_MOST_NAMED]))} and {len(parts) - _MOST_NAMED} more'
