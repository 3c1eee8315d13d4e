"""Finds the buffers that are in memory at the peak of a sequence of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class LiveBuffer(Protocol):
    """A place in memory.

    Attributes:
      nbytes: its size in bytes.
      last: the number of the last operation that needs it.
    """

    last: int

    @property
    def nbytes(self) -> int: ...


_Buffer = TypeVar('_Buffer', bound=LiveBuffer)


def buffers_at_peak(
    made: Sequence[Sequence[_Buffer]], inside: Mapping[int, Sequence[_Buffer]]
) -> list[_Buffer]:
    """Returns the buffers that are live when memory use is highest, without empty ones.

    Args:
      made: for each operation, in the order in which they run, the buffers that it makes.
      inside: the buffers at the peak of the loop or call that an operation runs, by the number of
        the operation.
    """
    live: list[_Buffer] = []
    best: list[_Buffer] = []
    size, most = 0, 0
    for time, new in enumerate(made):
        live += new
        size += count_bytes(new) if new else 0
        inner = inside.get(time, ())
        if (total := size + (count_bytes(inner) if inner else 0)) > most:
            most, best = total, [*live, *inner]
        if ended := [buffer for buffer in live if buffer.last <= time]:
            size -= count_bytes(ended)
            live = [buffer for buffer in live if buffer.last > time]
    return [buffer for buffer in best if buffer.nbytes]


def count_bytes(buffers: Sequence[LiveBuffer]) -> int:
    """The size of all buffers together."""
    return sum(buffer.nbytes for buffer in buffers)
