"""A record without the mesh axes that have one device, which divide nothing and exchange nothing.

Rules of large models name many axes, most of which have one device on a small machine. P(('fsdp',
'expert'), None) is P('fsdp', None) if 'expert' has one device.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.records.record import Record, RecordedArray, RecordedCollective
from partitioning.rules import as_tuple, from_tuple, spec_str

_SPEC = re.compile(r'P(\(.*?\))(?=, inside|$)')


def in_effect(record: Record) -> Record:
    """The record whose mesh, layouts and collectives name axes of several devices only."""
    mesh, results, collectives = record.mesh, record.results, record.collectives
    return dataclasses.replace(
        record,
        mesh={axis: size for axis, size in mesh.items() if size != 1},
        arguments=_in_effect(record.arguments, mesh),
        results=None if results is None else _in_effect(results, mesh),
        collectives=None if collectives is None else _asked_for(collectives, mesh),
    )


def _asked_for(
    collectives: Sequence[RecordedCollective], mesh: Mapping[str, int]
) -> tuple[RecordedCollective, ...]:
    found: dict[tuple[str, tuple[str, ...], str | None], RecordedCollective] = {}
    for one in collectives:
        axes = tuple(axis for axis in one.axes if mesh.get(axis) != 1)
        if axes:
            key = one.name, axes, one.partners
            known = found.get(key)
            count, at = (known.count, known.at) if known is not None else (0, ())
            found[key] = dataclasses.replace(
                one, axes=axes, count=count + one.count, at=(*at, *one.at)
            )
    return tuple(found.values())


def _in_effect(
    arrays: Sequence[RecordedArray], mesh: Mapping[str, int]
) -> tuple[RecordedArray, ...]:
    return tuple(
        dataclasses.replace(
            array, spec=_SPEC.sub(lambda found: _without_ones(found[1], mesh), array.spec)
        )
        for array in arrays
    )


def _without_ones(entries: str, mesh: Mapping[str, int]) -> str:
    """A layout as code, given its entries as code: "('data', None)"."""
    inside = entries[1:-1].rstrip(', ')
    try:
        held: tuple[Any, ...] = ast.literal_eval(f'({inside},)') if inside else ()
    except (SyntaxError, ValueError):  # an entry is open
        return f'P{entries}'
    kept = [from_tuple(tuple(a for a in as_tuple(one) if mesh.get(a) != 1)) for one in held]
    return spec_str(PartitionSpec(*kept))
