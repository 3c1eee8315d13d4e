"""What a restore would do, found without reading any array: differences, bytes and processes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

import jax
from rich.table import Table

from partitioning.amounts import bytes_str
from train.checkpoints.arrays.placing import by_size, find_shares
from train.checkpoints.arrays.stored import Bounds, StoredArray
from train.checkpoints.matching import Difference, Wanted
from train.errors import ConfigError
from train.reporting.console import RunConsole

MAX_ROWS = 20
# What differs, and what happens with the array if the settings allow it.
_KINDS = {
    'missing': ('missing', 'initialized'),
    'extra': ('extra', 'not restored'),
    'dtype': ('other dtype', 'converted'),
    'shape': ('other shape', ''),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is known about a restore before any array is read.

    Attributes:
      path: the folder of the checkpoint.
      num_arrays: the number of arrays to restore.
      num_bytes: their size in the checkpoint without compression, in bytes.
      process_bytes: the bytes that each process reads, by its index. A chunk that is read in part
        counts as a whole.
      differences: the arrays that differ between the checkpoint and the run.
      problem: why the checkpoint cannot be restored, in one line, or None.
      is_verified: whether the checkpoint has a manifest, so that checksums are verified.
    """

    path: str
    num_arrays: int
    num_bytes: int
    process_bytes: tuple[int, ...]
    differences: tuple[Difference, ...]
    problem: str | None
    is_verified: bool

    @property
    def read_amplification(self) -> float:
        """The bytes that all processes read, divided by the bytes of the arrays."""
        return sum(self.process_bytes) / self.num_bytes if self.num_bytes else 1.0

    def check(self) -> None:
        """Raises a ConfigError if the checkpoint cannot be restored."""
        if self.problem is not None:
            raise ConfigError(self.problem)

    def report(self, console: RunConsole) -> None:
        """Prints one line, and a table if arrays differ."""
        console.say(self.describe())
        if self.differences:
            console.show(self.table())

    def describe(self) -> str:
        """The sizes in one line."""
        text = f'{self.num_arrays:,} arrays with {bytes_str(self.num_bytes)} to restore'
        if len(self.process_bytes) > 1:
            least, most = (bytes_str(f(self.process_bytes)) for f in (min, max))
            each = most if least == most else f'{least} to {most}'
            text += f', {each} per process'
        text += f'; read amplification {self.read_amplification:.2f}'
        counts = Counter((one.kind, one.is_allowed) for one in self.differences)
        for (kind, is_allowed), count in sorted(counts.items()):
            text += f'; {count:,} {_name(kind, is_allowed)}'
        return text if self.is_verified else f'{text}; without a manifest, nothing can be verified'

    def table(self) -> Table:
        """A table of the first arrays that differ."""
        table = Table(box=None, pad_edge=False, header_style='bold')
        for column in ('array', 'checkpoint', 'run', 'difference'):
            table.add_column(column, overflow='fold')
        # Whatever makes the restore fail comes first.
        rows = sorted(self.differences, key=lambda one: one.is_allowed)
        for one in rows[:MAX_ROWS]:
            difference = _name(one.kind, one.is_allowed)
            stored = one.stored.removesuffix(' in the checkpoint')
            table.add_row(one.name, stored, one.wanted, difference)
        if len(rows) > MAX_ROWS:
            table.add_row(f'and {len(rows) - MAX_ROWS:,} more', '', '', '')
        return table


def _name(kind: str, is_allowed: bool) -> str:
    """A difference and its consequence, in words."""
    name, consequence = _KINDS[kind]
    return f'{name}, {consequence if is_allowed else "an error"}'


def count_bytes(found: Mapping[str, StoredArray], wanted: Wanted) -> tuple[int, ...]:
    """The bytes that each process reads, by its index."""
    read = dict[int, int].fromkeys(range(jax.process_count()), 0)
    for number, name in enumerate(by_size(found)):
        array, chunks = found[name], set[tuple[int, Bounds]]()
        if array.shape != wanted[name].shape:
            continue
        for share in find_shares(array, wanted[name], number):
            for piece in share.pieces:
                whole = _whole_chunks(piece.bounds, array)
                chunks |= {(process, whole) for process in piece.readers}
        for process, bounds in chunks:
            size = math.prod(last - first for first, last in bounds)
            read[process] = read.get(process, 0) + size * array.dtype.itemsize
    return tuple(read[process] for process in sorted(read))


def _whole_chunks(bounds: Bounds, array: StoredArray) -> Bounds:
    """The smallest slice that consists of whole chunks and contains the one that is given."""
    if array.chunk is None:
        return bounds
    dimensions = zip(bounds, array.chunk, array.shape, strict=True)
    return tuple(
        (first // chunk * chunk, min(-(-last // chunk) * chunk, size))
        for (first, last), chunk, size in dimensions
    )
