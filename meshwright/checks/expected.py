"""What a test expects of exchanges: a kind, axes, a number of executions, and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from meshwright.program.collectives import RING_SHARES
from partitioning.amounts import bytes_str, parse_bytes
from partitioning.rules import nearest

Axes = str | tuple[str, ...]
# {('all-gather', 'fsdp'): 24, 'all-reduce': '1.5 MB', ('all-to-all', ('x', 'y')): (2, '3 MB')}
Expected = Mapping[str | tuple[str, Axes], int | str | tuple[int, str]]


class Key(NamedTuple):
    """A kind of exchange, and the mesh axes that it goes over; None stands for all axes."""

    kind: str
    axes: frozenset[str] | None

    def text(self, mesh: Mapping[str, int]) -> str:
        """The exchanges for people: 'all-gather over data, fsdp'."""
        if self.axes is None:
            return f'{self.kind} over all axes'
        return f'{self.kind} over {", ".join(_ordered(self.axes, mesh)) or "unnamed axes"}'

    def written(self, mesh: Mapping[str, int]) -> str:
        """The key as a test writes it: "('all-gather', 'fsdp')"."""
        if self.axes is None:
            return repr(self.kind)
        axes = _ordered(self.axes, mesh)
        return repr((self.kind, axes[0] if len(axes) == 1 else axes))


@dataclasses.dataclass(frozen=True)
class Amount:
    """How often exchanges are executed, and the bytes that a device sends; None is not compared."""

    count: int | None = None
    nbytes: str | None = None

    def problem(self, sent: float, count: int, tolerance: float) -> str:
        """What is wrong with exchanges, or ''."""
        problems = []
        if self.count is not None and self.count != count:
            problems.append(f'executed {count:,} times, expected {self.count:,}')
        if self.nbytes is not None:
            wanted, half_digit = parse_bytes(self.nbytes)
            if abs(sent - wanted) > tolerance * wanted + half_digit:
                problems.append(f'{bytes_str(sent)}, expected {self.nbytes}')
        return '; '.join(problems)


def read_expected(expected: Expected, mesh: Mapping[str, int]) -> dict[Key, Amount]:
    """Checks what a test expects.

    Args:
      expected: what the test has written.
      mesh: the axes of the mesh.

    Raises:
      ValueError: if it is malformed, or names an unknown kind or axis.
    """
    found: dict[Key, Amount] = {}
    for written, amount in expected.items():
        key = _read_key(written, mesh)
        if key in found:
            raise ValueError(f'{key.written(mesh)} is expected twice: write it once')
        found[key] = _read_amount(written, amount)
    for key in found:
        if key.axes is not None and Key(key.kind, None) in found:
            raise ValueError(
                f'{key.kind!r} counts all axes, and {key.written(mesh)} is a part of it: write one '
                'of them'
            )
    return found


def _read_key(written: Any, mesh: Mapping[str, int]) -> Key:
    kind, axes = (written, None) if isinstance(written, str) else _pair(written)
    if kind not in RING_SHARES:
        raise ValueError(f'no kind of exchange {kind!r}.{_hint(kind, RING_SHARES)}')
    if axes is None:
        return Key(kind, None)
    named = (axes,) if isinstance(axes, str) else axes
    for axis in named:
        if axis not in mesh:
            raise ValueError(f'no mesh axis {axis!r}.{_hint(axis, mesh)}')
    return Key(kind, frozenset(named))


def _pair(written: Any) -> tuple[str, Axes]:
    if isinstance(written, tuple) and len(written) == 2 and isinstance(written[1], str | tuple):
        return written
    raise ValueError(
        f"{written!r} is not a kind with axes: write ('all-gather', 'data') or ('all-reduce', "
        "('data', 'model'))"
    )


def _read_amount(written: Any, amount: Any) -> Amount:
    parts = amount if isinstance(amount, tuple) else (amount,)
    counts = [p for p in parts if isinstance(p, int) and not isinstance(p, bool)]
    texts = [p for p in parts if isinstance(p, str)]
    if len(counts) + len(texts) != len(parts) or len(counts) > 1 or len(texts) > 1 or not parts:
        raise ValueError(
            f'{written!r} is expected as {amount!r}: write a number of executions, bytes such as '
            "'1.5 MB', or both, (3, '1.5 MB')"
        )
    for text in texts:
        parse_bytes(text)
    return Amount(counts[0] if counts else None, texts[0] if texts else None)


def _hint(name: Any, known: Iterable[str]) -> str:
    names = list(known)
    guess = nearest(str(name).replace('_', '-'), names) or nearest(str(name), names)
    return f'{guess} There are {", ".join(names) or "none"}'


def _ordered(axes: Iterable[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Axes in the order of the mesh."""
    return tuple(axis for axis in mesh if axis in {*axes})
