"""Lists the differences in meaning between two records.

Names of variables and functions, lines, files and order are not compared. What the code says comes
first: arrays, donation, constraints, checkpoints and types. What a compiler makes of it follows:
results, exchanges, memory and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.records.comparing_code import compare_code
from meshwright.records.difference import (
    Difference,
    Kind,
    Tolerances,
    join_alike,
    of_numbers,
)
from meshwright.records.effective_layouts import in_effect
from meshwright.records.exchanged import compare_exchanges
from meshwright.records.record import (
    NOWHERE,
    At,
    Record,
    RecordedArray,
    RecordedBuffer,
    RecordedNote,
)
from meshwright.records.renamed import Pair, names_after, pair_arrays, rename
from meshwright.report.figures import verdict
from partitioning.amounts import bytes_str
from partitioning.plan.tables import shape_str
from partitioning.rules import describe_axes

_SLACK = 1024  # bytes by which a peak may differ in any case
_MOST_OF_IT = 0.5  # the share of a difference that explains it


def compare_records(
    before: Record,
    after: Record,
    tolerances: Tolerances = Tolerances(),  # noqa: B008  (it is frozen)
) -> tuple[Difference, ...]:
    """Returns what differs, the code first; empty if both mean the same.

    What one of them does not know is not compared.

    Args:
      before: the record that a reviewer has agreed to.
      after: the record of the present program.
      tolerances: how much figures may differ.
    """
    before, after = in_effect(before), in_effect(after)
    pairs = pair_arrays(before.arguments, after.arguments)
    names = names_after(pairs)
    arguments = [*_arrays('argument', pairs)]
    found = [
        *_machine(before, after),
        *arguments,
        *compare_code(before, after, pairs),
        *_results(before, after, arguments),
    ]
    written_out = before.loops != after.loops and before.loops is not None
    arranged = not found and before.loops is not None
    if arranged:  # then a compiler has only arranged the same program in another way
        layers = max((*(before.loops or ()), *(after.loops or ()), 2)) if written_out else 0
        tolerances = tolerances.widened(layers)
    found += [
        *_notes(before.rematerialized, after.rematerialized, 'rematerialization', {}),
        *_notes(before.recompiled, after.recompiled, 'recompilation', names),
        *compare_exchanges(before, after, names, tolerances, by_weight=bool(found)),
        *_memory(before, after, tolerances),
    ]
    if (
        before.seconds
        and after.seconds
        # Layers overlap with the next ones if a loop is written out.
        and not (arranged and written_out)
        and _differs(before.seconds, after.seconds, tolerances.time)
    ):
        exchange = next((d.at for d in found if d.kind == 'exchange'), NOWHERE)
        at = At(line=exchange.line, text=exchange.text)
        figures = before.seconds, after.seconds
        found.append(of_numbers('time', 'time of a call', *figures, 'seconds', at))
    return join_alike(found)


def _differs(before: float, after: float, tolerance: float) -> bool:
    return abs(after - before) > tolerance * max(abs(before), abs(after))


def _machine(before: Record, after: Record) -> Iterator[Difference]:
    def name(record: Record) -> str:
        slices = f'{record.num_slices} x ' if record.num_slices > 1 else ''
        return slices + record.topology

    if name(before) != name(after):
        yield Difference(kind='machine', subject='topology', before=name(before), after=name(after))
    # In another order, other chips are neighbours along an axis.
    if [*before.mesh.items()] != [*after.mesh.items()]:
        was, now = describe_axes(before.mesh), describe_axes(after.mesh)
        yield Difference(kind='machine', subject='mesh', before=was, after=now)


def _arrays(kind: Kind, pairs: Sequence[Pair]) -> Iterator[Difference]:
    """Arrays that are missing, new, or have another type or layout."""
    for one, other in pairs:
        if one is None and other is not None:
            yield _array(kind, other, '', _described(other))
        elif other is None and one is not None:
            yield _array(kind, one, _described(one), '')
        elif one is not None and other is not None:
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                yield _array(kind, other, _type(one), _type(other))
            if one.spec != other.spec:
                yield _array(kind, other, _layout(one), _layout(other))


def _array(kind: Kind, array: RecordedArray, before: str, after: str) -> Difference:
    at = At(rule=array.reason)
    return Difference(kind=kind, subject=array.path, before=before, after=after, at=at)


def _layout(array: RecordedArray) -> str:
    return f'{array.spec}, {bytes_str(array.bytes_per_device)} per device'


def _type(array: RecordedArray) -> str:
    return f'{array.dtype} {shape_str(array.shape)}'


def _described(array: RecordedArray) -> str:
    return f'{_type(array)}, {_layout(array)}'


def _results(
    before: Record, after: Record, arguments: Sequence[Difference]
) -> Iterator[Difference]:
    """Results that changed, except for those that changed as the arguments that they replace."""
    if before.results is None or after.results is None:
        return
    told = {(one.before, one.after) for one in arguments}
    for found in _arrays('result', pair_arrays(before.results, after.results)):
        if (found.before, found.after) not in told:
            yield found


def _notes(
    before: Sequence[RecordedNote] | None,
    after: Sequence[RecordedNote] | None,
    kind: Kind,
    names: Mapping[str, str],
) -> Iterator[Difference]:
    """Arrays that are made whole, or that compile again, and were or are not."""
    if before is None or after is None:
        return
    old = {rename(note.what, names): note for note in before}
    new = {note.what: note for note in after}
    for what in {**old, **new}:
        if what not in new:
            yield Difference(kind=kind, subject=what, before=old[what].why, after='')
        elif what not in old:
            yield Difference(kind=kind, subject=what, before='', after=new[what].why)


def _memory(before: Record, after: Record, tolerances: Tolerances) -> Iterator[Difference]:
    if before.fits != after.fits:
        verdicts = verdict(before.fits), verdict(after.fits)
        yield Difference(
            kind='memory', subject='the machine', before=verdicts[0], after=verdicts[1]
        )
    was, now = before.peak, after.peak
    if before.loops is not None and before.aliased is None and before.loops != after.loops:
        return  # a peak by formula, which knows too little about loops that are written out
    if _differs(was, now, tolerances.peak) and abs(was - now) > _SLACK:
        at = _of_buffers(before.buffers, after.buffers, now > was)
        for noun, held in (
            ('arguments', [_bytes_of(r.arguments) for r in (before, after)]),
            ('results', [_bytes_of(r.results or ()) for r in (before, after)]),
        ):
            if (held[1] - held[0]) / (now - was) > _MOST_OF_IT:
                at = At(why=f'the {noun}: {bytes_str(held[0])} -> {bytes_str(held[1])}')
                break
        yield of_numbers('memory', 'peak memory of a device', was, now, 'bytes', at)
    left, now_left = _not_replaced(before), _not_replaced(after)
    if left is None or now_left is None:
        return
    if abs(left - now_left) > tolerances.peak * before.peak:
        subject = 'donated arguments that no result replaces'
        yield of_numbers('memory', subject, left, now_left, 'bytes')


def _bytes_of(arrays: Sequence[RecordedArray]) -> int:
    return sum(array.bytes_per_device for array in arrays)


def _not_replaced(record: Record) -> int | None:
    """The bytes of donated arguments whose memory no result takes; None if nobody knows."""
    if record.aliased is None:
        return None
    donated = sum(array.bytes_per_device for array in record.arguments if array.donated)
    return max(donated - record.aliased, 0)


def _of_buffers(
    before: Sequence[RecordedBuffer], after: Sequence[RecordedBuffer], grew: bool
) -> At:
    """The line of the buffers that grew most, or that shrank most."""
    changes: dict[str, float] = {}
    places: dict[str, At] = {}
    for sign, buffers in ((-1, before), (1, after)):
        for one in buffers:
            key = one.at.text or one.array
            changes[key] = changes.get(key, 0) + sign * one.bytes
            places[key] = one.at
    ordered = sorted(changes, key=lambda key: -changes[key] if grew else changes[key])
    return places[ordered[0]] if ordered else At()
