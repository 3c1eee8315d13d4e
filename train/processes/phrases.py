"""What messages say of the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence


def died(name: str, place: str) -> str:
    """Says that a process has died, and what it did at its last sign of life."""
    return f'{name} died, last seen at {place!r}'


def silent(name: str, place: str, seconds: float, limit: float) -> str:
    """Says that a process gives no sign of life, and what it did at the last one.

    Args:
      name: what the process is called.
      place: what it did.
      seconds: how long ago that was.
      limit: the limit that it has passed, in seconds.
    """
    return (
        f'{name} has given no sign of life for {seconds:,.0f} s, since it was at {place!r}: it is '
        f'stopped, or its host or network has failed (--heartbeat_seconds={limit:g})'
    )


def waiting(indices: Sequence[int]) -> str:
    """Says that processes wait, as in 'process 3 waits' or 'processes 0, 1 and 3 wait'."""
    if len(indices) == 1:
        return f'process {indices[0]} waits'
    few = sorted(indices)[:8]
    more = f' and {len(indices) - len(few)} more' if len(indices) > len(few) else ''
    return f'processes {enumerated(list(map(str, few)))}{more} wait'


def enumerated(items: Sequence[str]) -> str:
    """Joins words, as in 'a, b and c'."""
    return ' and '.join(filter(None, [', '.join(items[:-1]), items[-1]]))
