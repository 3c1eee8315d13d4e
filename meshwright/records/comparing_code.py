"""What the code of two programs says differently: donation, constraints, remat and types."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from meshwright.records.difference import Difference, new_places, of_numbers
from meshwright.records.record import (
    At,
    Record,
    RecordedCheckpoint,
    RecordedCollective,
    RecordedConstraint,
    RecordedPrecision,
)
from meshwright.records.renamed import Pair
from partitioning.amounts import share_str
from partitioning.plan.tables import count, shape_str

_SAME_FLOPS = 1e-3  # the share by which FLOPs may differ
# If a loop is written out, the first layer may need no gradient of its input, a third of its FLOPs.
_OF_ONE_LAYER = 0.4
_SAME_SHARE = 0.01  # of one kind of arithmetic that may have another type
_ELEMENTWISE = 'elementwise operations'  # of which few may have any type


def compare_code(before: Record, after: Record, pairs: Sequence[Pair]) -> Iterator[Difference]:
    """Yields what the code says differently, except for the layouts of its arguments.

    Args:
      before, after: the records.
      pairs: their arguments.
    """
    for one, other in pairs:
        if one is not None and other is not None and one.donated != other.donated:
            was, now = ('donated' if x.donated else 'kept' for x in (one, other))
            yield Difference(kind='donation', subject=other.path, before=was, after=now)
    shapes_changed = any(
        one is None or other is None or one.shape != other.shape for one, other in pairs
    )
    if before.constraints is not None and after.constraints is not None:
        yield from _constraints(before.constraints, after.constraints, shapes_changed)
    if before.collectives is not None and after.collectives is not None:
        yield from _collectives(before.collectives, after.collectives)
    if before.checkpoints is not None and after.checkpoints is not None:
        yield from _checkpoints(before.checkpoints, after.checkpoints)
    if before.precisions is not None and after.precisions is not None:
        # What is computed again for another policy is elementwise, too, and so are the sums of
        # gradients that a loop keeps and a loop that is written out does not.
        same_sums = _policies(before) == _policies(after) and before.loops == after.loops
        yield from _precisions(
            *(
                [p for p in held if same_sums or p.family != _ELEMENTWISE]
                for held in (before.precisions, after.precisions)
            )
        )
    yield from _flops(before, after)


def _constraints(
    before: Sequence[RecordedConstraint],
    after: Sequence[RecordedConstraint],
    shapes_changed: bool,
) -> Iterator[Difference]:
    """Layouts that are stated for other values, or more or less often."""
    old, now = ({(c.shape, c.spec): c.at for c in held} for held in (before, after))

    def gone(key: tuple[tuple[int, ...], str]) -> At:
        return new_places(now.get(key, ()), old[key])

    def added(key: tuple[tuple[int, ...], str]) -> At:
        return new_places(old.get(key, ()), now[key])

    left, new = (
        collections.Counter({(c.shape, c.spec): c.count for c in held}) for held in (before, after)
    )
    left, new = left - new, new - left
    if shapes_changed:  # then the same layout of another shape is what the code said before
        _drop_equal_specs(left, new)
    for (shape, spec), times in sorted(left.items()):
        for other, spec_now in sorted(new):
            moved = min(times, new[other, spec_now])
            if other != shape or not moved:
                continue
            yield _constraint(shape, spec, spec_now, moved, added((other, spec_now)))
            new[other, spec_now] -= moved
            times -= moved
        if times:
            yield _constraint(shape, spec, '', times, gone((shape, spec)))
    for (shape, spec), times in sorted(new.items()):
        if times:
            yield _constraint(shape, '', spec, times, added((shape, spec)))


def _drop_equal_specs(
    left: collections.Counter[tuple[tuple[int, ...], str]],
    new: collections.Counter[tuple[tuple[int, ...], str]],
) -> None:
    for shape, spec in list(left):
        for other, spec_now in list(new):
            if spec == spec_now and shape != other:
                same = min(left[shape, spec], new[other, spec_now])
                left[shape, spec] -= same
                new[other, spec_now] -= same


def _constraint(shape: tuple[int, ...], before: str, after: str, number: int, at: At) -> Difference:
    times = f', {number:,} times' if number > 1 else ''
    subject = f'layout of {shape_str(shape)} in the code{times}'
    return Difference(kind='constraint', subject=subject, before=before, after=after, at=at)


def _collectives(
    before: Sequence[RecordedCollective], after: Sequence[RecordedCollective]
) -> Iterator[Difference]:
    """Exchanges that the code asks for more or less often, or between other devices."""
    has_partners = all(c.partners is not None for c in (*before, *after))
    for name, axes in sorted({(c.name, c.axes) for c in (*before, *after)}):
        pair = [[c for c in held if (c.name, c.axes) == (name, axes)] for held in (before, after)]
        was, now = (sum(c.count for c in held) for held in pair)
        partners = [{c.partners: c.count for c in held} if has_partners else {} for held in pair]
        if was == now and partners[0] == partners[1]:
            continue
        shown = [_asked_for(held, partners[0].keys() != partners[1].keys()) for held in pair]
        places = [[at for c in held for at in c.at] for held in pair]
        yield Difference(
            kind='collective',
            subject=f'{name} over {", ".join(axes)} in the code',
            before=shown[0],
            after=shown[1],
            at=new_places(*(places if now >= was else places[::-1])),
        )


def _asked_for(held: Sequence[RecordedCollective], with_partners: bool) -> str:
    """How often an exchange is executed, and between which devices if these are others."""
    if not with_partners:
        return count(sum(c.count for c in held), 'time') if held else ''
    return '; '.join(
        count(c.count, 'time') + (f', devices {c.partners}' if c.partners else '') for c in held
    )


def _policies(record: Record) -> set[str]:
    return {checkpoint.policy for checkpoint in record.checkpoints or ()}


def _checkpoints(
    before: Sequence[RecordedCheckpoint], after: Sequence[RecordedCheckpoint]
) -> Iterator[Difference]:
    old, new = ({c.policy: c for c in held} for held in (before, after))
    gone = [c for policy, c in old.items() if policy not in new]
    added = [c for policy, c in new.items() if policy not in old]
    for one, other in zip(gone, added, strict=False):
        yield _checkpoint(one.policy, other.policy, new_places(one.at, other.at))
    for one in gone[len(added) :]:
        yield _checkpoint(one.policy, 'nothing is computed again', new_places((), one.at))
    for other in added[len(gone) :]:
        yield _checkpoint('nothing is computed again', other.policy, new_places((), other.at))


def _checkpoint(before: str, after: str, at: At) -> Difference:
    subject = 'what jax.checkpoint keeps'
    return Difference(kind='checkpoint', subject=subject, before=before, after=after, at=at)


def _precisions(
    before: Sequence[RecordedPrecision], after: Sequence[RecordedPrecision]
) -> Iterator[Difference]:
    """Kinds of arithmetic of which another share has some type."""
    families = dict.fromkeys(p.family for p in (*before, *after) if p.family != 'conversions')
    for family in families:
        old, new = ({p.dtype: p for p in held if p.family == family} for held in (before, after))
        if not old or not new:
            continue
        shares = [
            {dtype: p.amount / sum(q.amount for q in held.values()) for dtype, p in held.items()}
            for held in (old, new)
        ]
        changed = [
            dtype
            for dtype in {**old, **new}
            if _other_share(family, shares[0].get(dtype), shares[1].get(dtype))
        ]
        if changed:
            was, now = (
                ', '.join(f'{d} {share_str(held[d])}' for d in changed if d in held) or 'none'
                for held in shares
            )
            changed.sort(key=lambda d: shares[1].get(d, 0) - shares[0].get(d, 0))
            grown = [at for held in (old, new) for at in getattr(held.get(changed[-1]), 'at', ())]
            at = _converted(before, after, changed[0], changed[-1]) or new_places((), grown)
            subject = f'types of {family}'
            yield Difference(kind='precision', subject=subject, before=was, after=now, at=at)


def _other_share(family: str, was: float | None, now: float | None) -> bool:
    """Whether another share of one kind of arithmetic has a type; None if none has it."""
    if family != _ELEMENTWISE and (was is None or now is None):
        return True
    return abs((was or 0) - (now or 0)) > _SAME_SHARE


def _converted(
    before: Sequence[RecordedPrecision],
    after: Sequence[RecordedPrecision],
    shrunk: str,
    grown: str,
) -> At | None:
    """The line of a conversion or product that explains why a type changed; None without one.

    Args:
      before, after: the types of two programs.
      shrunk, grown: the types that less and more of the arithmetic has.
    """
    found: tuple[list[At], list[At]] = ([], [])
    for family in ('conversions', 'products'):
        old, new = (
            [(p.dtype.rpartition(' ')[2], at) for p in held if p.family == family for at in p.at]
            for held in (before, after)
        )
        known = {at.text for _, at in old}, {at.text for _, at in new}
        found[0].extend(at for to, at in old if to in shrunk.split() and at.text not in known[1])
        found[1].extend(at for to, at in new if to in grown.split() and at.text not in known[0])
    return next(iter((*found[0], *found[1])), None)


def _flops(before: Record, after: Record) -> Iterator[Difference]:
    at = At()
    if before.precisions and after.precisions:
        lines = [
            [at for p in record.precisions or () if p.family == 'products' for at in p.at]
            for record in (before, after)
        ]
        at = new_places(*lines)
    same = _SAME_FLOPS
    if before.loops is not None and after.loops is not None and before.loops != after.loops:
        same = _OF_ONE_LAYER / max((*before.loops, *after.loops, 2))
    labels = ('FLOPs of the model', 'FLOPs with recomputation')
    pairs = (
        (before.model_flops, after.model_flops),
        (before.program_flops, after.program_flops),
    )
    for label, (was, now) in zip(labels, pairs, strict=True):
        if was is not None and now is not None and abs(was - now) > same * max(was, now):
            yield of_numbers('computation', label, was, now, 'FLOPs', at)
