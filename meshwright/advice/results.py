"""Results that are gathered because the out_shardings of the function lack a mesh axis.

    jax.jit(prefill, out_shardings=NamedSharding(mesh, P(None, 'data')))

If the cache that `prefill` returns is sharded over 'model', too, all devices along 'model' get all
of it. The layout that it has before the gather can be written in out_shardings.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding

from meshwright.advice.advised import Told
from meshwright.causes.cause import CodeChange, Effect, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.values import Axes
from meshwright.program.collectives import Collective
from partitioning.rules import as_tuple

Key = tuple[int | None, Axes, tuple[object, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredResult(Told):
    """Results of one layout that out_shardings gather.

    Attributes:
      keys: the number of each result, and the mesh axes and the array of its gather.
      effect: what the function sends with their layout before the gather.
    """

    keys: frozenset[Key]
    effect: Effect

    @property
    def is_avoidable(self) -> bool:
        return False  # the caller may need all of it on each device

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        return evidence is not None and _key(evidence) in self.keys


def find_gathered_results(
    call: TracedCall,
    explanation: Explanation,
    peak: int,
    returned: Sequence[str] = (),
) -> Iterator[GatheredResult]:
    """Finds the gathers of results whose out_shardings lack the mesh axes of the gather.

    Args:
      call: the trace of the function.
      explanation: the causes of its exchanges.
      peak: the peak of its memory, in bytes.
      returned: for each result, the path of the argument that it replaces; '' for others.
    """
    sends = sum(c.total_bytes for c, _ in explanation.collectives)
    given = {path: axes_of_row(row) for path, row in explanation.possible.layouts.rows.items()}
    groups: dict[tuple[str, str, Axes], list[tuple[int, float]]] = {}
    keys: dict[tuple[str, str, Axes], set[Key]] = collections.defaultdict(set)
    for nbytes, number, evidence in _gathers(call, explanation):
        stated = spec_text(_axes(call.results[number].spec))
        key = stated, spec_text(evidence.layout), evidence.axes
        groups.setdefault(key, []).append((number, nbytes))
        keys[key].add(_key(evidence))
    for (stated, wanted, axes), found in groups.items():
        named = call.result_names[found[0][0]] or f'result {found[0][0]}'
        others = len({number for number, _ in found}) - 1
        more = f' and {others} more like it' if others else ''
        saved = sum(nbytes for _, nbytes in found)
        path = returned[found[0][0]] if returned else ''
        if path and path in given and spec_text(given[path]) == wanted:
            continue  # it is returned unlike the argument, which is a change of its own
        text = f'write {wanted} for {named}{more} in out_shardings'
        if path:
            text = f'lay out {path}{more} as {wanted}, as an argument and in out_shardings'
        yield GatheredResult(
            keys=frozenset(keys[stated, wanted, axes]),
            array=path or named,
            why=(
                f'out_shardings lay out {named}{more} as {stated}, and it is computed as {wanted}, '
                f'so all devices along {over(axes)} get all of it'
            ),
            change=CodeChange(source='', text=text),
            effect=Effect(sent=(sends, sends - saved), peak=(peak, peak)),
        )


def _gathers(call: TracedCall, explanation: Explanation) -> Iterator[tuple[float, int, Evidence]]:
    """The gathers of results: their bytes, the number of the result, and what they move.

    A gather of an array like another one, such as of a loop that returns keys and values, may have
    lost its result on the way: it is then of a result of the same type and layout.
    """
    pairs = [
        (c, e) for (c, _), e in zip(explanation.collectives, explanation.evidence, strict=True)
    ]
    known: dict[tuple[object, ...], int] = {}
    taken = set[int]()
    for collective, evidence in pairs:
        number = None if evidence is None else evidence.result
        if evidence is not None and number is not None and _is_gathered(evidence, call):
            known.setdefault(_key(evidence)[1:], number)
            taken.add(number)
            yield collective.total_bytes, number, evidence
    types = [(a.shape, a.dtype, s) for a, s in zip(call.jaxpr.out_avals, call.results, strict=True)]
    for collective, evidence in pairs:
        if evidence is None or evidence.result is not None or evidence.kind != 'all-gather':
            continue
        like = known.get(_key(evidence)[1:])
        others = [n for n, one in enumerate(types) if like is not None and one == types[like]]
        if left := [n for n in others if n not in taken]:
            taken.add(left[0])
            yield collective.total_bytes, left[0], evidence


def _is_gathered(evidence: Evidence, call: TracedCall) -> bool:
    value, number = evidence.value, evidence.result
    if evidence.kind != 'all-gather' or number is None or number >= len(call.results):
        return False
    if value is None or value.argument or value.gradient_of or value.update_of:
        return False
    stated = call.results[number]
    if not isinstance(stated, NamedSharding) or not any(evidence.layout):
        return False
    shape = call.jaxpr.out_avals[number].shape
    used = {a for axes in _axes(stated.spec) for a in axes}
    return value.shape == shape and not used & {*evidence.axes}


def _axes(spec: Any) -> list[Axes]:
    return [as_tuple(own) for own in spec]


def _key(evidence: Evidence) -> Key:
    value = evidence.value
    array = None if value is None else value.shape, evidence.layout, evidence.made_at
    return evidence.result, evidence.axes, array
