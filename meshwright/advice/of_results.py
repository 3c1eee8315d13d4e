"""Results that all devices get in full, although each device computes a part of them.

step = jax.jit(step, out_shardings=(NamedSharding(mesh, P()), ...))     # gathers the result
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding

from meshwright.advice.candidates import Match, Told
from meshwright.advice.function_view import FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row, sharding_of_row
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.values import Axes
from meshwright.program.collectives import Collective
from partitioning.plan.rows import PlanRow
from partitioning.rules import as_tuple

Key = tuple[int | None, Axes, tuple[object, ...]]


def find_gathered_results(view: FunctionView) -> Iterator[Told]:
    """Finds the gathers of results whose out_shardings lack the mesh axes of the gather."""
    call, returned = view.subject.call, view.subject.returned
    groups: dict[tuple[str, str, Axes], list[tuple[int, Key]]] = collections.defaultdict(list)
    for number, evidence in _gathers(view):
        stated = spec_text(_axes(call.results[number].spec))
        key = stated, spec_text(evidence.layout), evidence.axes
        groups[key].append((number, _key(evidence)))
    for (stated, wanted, axes), found in groups.items():
        named = call.result_names[found[0][0]] or f'result {found[0][0]}'
        others = len({number for number, _ in found}) - 1
        more = f' and {others} more like it' if others else ''
        path = returned[found[0][0]]
        if path in view.rows and spec_text(axes_of_row(view.rows[path])) == wanted:
            continue  # it is returned unlike the argument, which is a change of its own
        if path in view.rows and _is_divided_elsewhere(view, view.rows[path], axes):
            continue
        text = f'write {wanted} for {named}{more} in out_shardings'
        if path:
            text = f'lay out {path}{more} as {wanted}, as an argument and in out_shardings'
        keys = frozenset(key for _, key in found)
        yield Told(
            match=Match(axes=axes, also=functools.partial(_is_among, keys)),
            is_avoidable=False,  # the caller may need all of it on each device
            array=path or named,
            why=(
                f'out_shardings lay out {named}{more} as {stated}, and it is computed as {wanted}, '
                f'so all devices along {over(axes)} get all of it'
            ),
            change=CodeChange(source='', text=text),
        )


def _is_divided_elsewhere(view: FunctionView, row: PlanRow, axes: Axes) -> bool:
    """Whether a parameter is whole and other arrays of its shape in the state are not, as in ZeRO.

    These are what an optimizer keeps of it.
    """
    kept = (view.rows.get(path) for path in view.subject.returned if path != row.path)
    alike = (one for one in kept if one is not None and one.shape == row.shape)
    return row.role == 'parameters' and any({*axes} <= sharding_of_row(one) for one in alike)


def _is_among(keys: frozenset[Key], _: Collective, evidence: Evidence | None) -> bool:
    return evidence is not None and _key(evidence) in keys


def _gathers(view: FunctionView) -> Iterator[tuple[int, Evidence]]:
    """The gathers of results: the number of the result, and what they move.

    A gather of an array like another one, such as of a loop that returns keys and values, may have
    lost its result on the way: it is then of a result of the same type and layout.
    """
    call = view.subject.call
    known: dict[tuple[object, ...], int] = {}
    taken = set[int]()
    for _, evidence in view.exchanges:
        number = None if evidence is None else evidence.result
        if evidence is not None and number is not None and _is_gathered(evidence, call):
            known.setdefault(_key(evidence)[1:], number)
            taken.add(number)
            yield number, evidence
    types = [(a.shape, a.dtype, s) for a, s in zip(call.jaxpr.out_avals, call.results, strict=True)]
    for _, evidence in view.exchanges:
        if evidence is None or evidence.result is not None or evidence.kind != 'all-gather':
            continue
        like = known.get(_key(evidence)[1:])
        others = [n for n, one in enumerate(types) if like is not None and one == types[like]]
        if left := [n for n in others if n not in taken]:
            taken.add(left[0])
            yield left[0], evidence


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
