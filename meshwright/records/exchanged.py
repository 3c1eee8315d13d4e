"""What two programs exchange differently, by kind, axes, type, and array.

Compilers join exchanges and split them, so counts are not compared, and bytes are compared for all
exchanges of one kind over the same axes together. Which weights they are for is compared, too.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshwright.records.difference import Difference, Tolerances
from meshwright.records.record import SEVERAL, At, Record, RecordedExchange
from meshwright.records.renamed import rename
from partitioning.amounts import bytes_str

_SLACK = 256  # bytes by which the exchanges of one kind may differ in any case
_OTHER_ARRAYS = 0.25  # the share of one kind that may be for another weight

_Key = tuple[str, tuple[str, ...], str, str]


def compare_exchanges(
    before: Record,
    after: Record,
    names: Mapping[str, str],
    tolerances: Tolerances,
    *,
    by_weight: bool,
) -> Iterator[Difference]:
    """Yields the kinds of exchanges that send more or less, or for other weights.

    Args:
      before, after: the records.
      names: the present names of arguments that had others.
      tolerances: how much they may differ.
      by_weight: whether to compare for which weights they are. Compilers join exchanges in other
        orders, so this says something only if the code says something else.
    """
    renamed = [dataclasses.replace(one, array=rename(one.array, names)) for one in before.exchanges]
    by_weight = by_weight and before.loops == after.loops
    has_types = all(e.dtype for e in (*renamed, *after.exchanges))
    old, new = (_by_key(held, has_types) for held in (renamed, after.exchanges))
    slack = max(_SLACK, tolerances.sent * max(before.sent, after.sent))
    for key in sorted({**old, **new}):
        was, now = (sum(e.bytes for e in held.get(key, ())) for held in (old, new))
        pair = old.get(key, []), new.get(key, [])
        if abs(was - now) > max(tolerances.bytes * max(was, now), slack):
            yield _difference(key, was, now, pair)
        elif by_weight and was and now and (moved := _other_weight(*pair, was)) is not None:
            yield moved


def _by_key(
    exchanges: Sequence[RecordedExchange], has_types: bool
) -> dict[_Key, list[RecordedExchange]]:
    found: dict[_Key, list[RecordedExchange]] = collections.defaultdict(list)
    for e in exchanges:
        found[e.kind, e.axes, e.network, e.dtype if has_types else ''].append(e)
    return found


def _name(key: _Key) -> str:
    kind, axes, network, dtype = key
    of = f' of {dtype}' if dtype else ''
    over = network.upper()
    return f'{kind} over {", ".join(axes) or "unnamed axes"}{of} ({over})'


def _difference(
    key: _Key,
    was: float,
    now: float,
    pair: tuple[Sequence[RecordedExchange], Sequence[RecordedExchange]],
) -> Difference:
    return Difference(
        kind='exchange',
        subject=_name(key),
        before=bytes_str(was) if was else '',
        after=bytes_str(now) if now else '',
        was=was,
        now=now,
        unit='bytes',
        at=_most_changed(*pair),
    )


def _most_changed(before: Sequence[RecordedExchange], after: Sequence[RecordedExchange]) -> At:
    """The place of the array whose exchanges changed most."""
    changes: dict[str, float] = collections.defaultdict(float)
    places: dict[str, At] = {}
    for sign, held in ((-1, before), (1, after)):
        for e in held:
            changes[e.array] += sign * e.bytes
            places[e.array] = e.at
    array = max(changes, key=lambda name: abs(changes[name]))
    at = places[array]
    named = f'for {array}' if array else ''
    why = at.why if array and array in at.why else ': '.join(filter(None, (named, at.why)))
    return dataclasses.replace(at, why=why)


def _other_weight(
    before: Sequence[RecordedExchange], after: Sequence[RecordedExchange], total: float
) -> Difference | None:
    """The weight for which much more is exchanged than before, if all others have less."""
    shares = [_by_weight(held) for held in (before, after)]
    if not shares[0] or not shares[1]:
        return None
    changes = {
        name: shares[1].get(name, 0) - shares[0].get(name, 0) for name in {**shares[0], **shares[1]}
    }
    most = max(changes, key=lambda name: changes[name])
    least = min(changes, key=lambda name: changes[name])
    if changes[most] <= _OTHER_ARRAYS * total or -changes[least] <= _OTHER_ARRAYS * total:
        return None
    e = next(e for e in after if _weight(e) == most)
    return Difference(
        kind='exchange',
        subject=_name((e.kind, e.axes, e.network, e.dtype)),
        before=f'for {least}',
        after=f'for {most}',
        at=e.at,
    )


def _by_weight(exchanges: Sequence[RecordedExchange]) -> dict[str, float]:
    found: dict[str, float] = collections.defaultdict(float)
    for e in exchanges:
        if _weight(e):
            found[_weight(e)] += e.bytes
    return found


def _weight(e: RecordedExchange) -> str:
    """The argument that an exchange is for, directly or as a gradient; '' for activations."""
    path = e.array.rpartition(' of ')[2]
    return '' if path.startswith(('an ', 'its ')) or path == SEVERAL else path
