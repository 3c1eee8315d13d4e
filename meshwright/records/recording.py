"""Makes the record of a program."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshwright.auditing import list_results
from meshwright.calls.compiled_call import is_compiled
from meshwright.calls.compiling import Program
from meshwright.calls.held import HeldArray
from meshwright.causes import Cause
from meshwright.causes.cause import source_of
from meshwright.examining import examine
from meshwright.forecasting import forecast, forecast_examined
from meshwright.program.collectives import Collective
from meshwright.program.costs import read_memory, read_text
from meshwright.program.hlo_text import bits_of, numbers_in, parse_hlo
from meshwright.records.record import (
    SEVERAL,
    At,
    Record,
    RecordedArray,
    RecordedBuffer,
    RecordedExchange,
    RecordedNote,
)
from meshwright.records.traced_facts import find_facts, place_of
from meshwright.report.answers import COMPILERS, package_versions
from meshwright.report.call_audit import AuditedArray, CallAudit
from meshwright.report.forecasts import Forecast
from meshwright.user_lines import short_source
from partitioning.plan.rows import PlanRow
from partitioning.plan.tables import spec_or_padded_str
from partitioning.rules import axis_sizes

# The findings that say that the next call compiles again.
_RECOMPILING = ('changed layout', 'changed type', 'weak type')
# Libraries whose code can be a part of a program, if the program has loaded them.
_LIBRARIES = ('flax', 'optax', 'equinox', 'haiku')
_REMATERIALIZED = re.compile(
    r'from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) .*?= (?P<array>\w+\[[\d,]*\])'
)
_BUFFERS = 12
# Settings of `forecast` that say what is described, and not which program it is.
_DESCRIBING = ('changes', 'confirm', 'seconds', 'explain')
_FRAME = re.compile(r'stack_frame_id=(\d+)')


def record_call(fn: Any, args: Sequence[Any], **settings: Any) -> tuple[Record, Forecast]:
    """Returns what a call of a function is by meaning, and its forecast.

    Of a function that was compiled already, the code is not known.

    Args:
      fn: the function, as for `forecast`.
      args: the arguments of the call; abstract ones suffice.
      **settings: the settings of `forecast`. By default no change is compiled: a record has none.

    Raises:
      ValueError: as in `forecast`.
    """
    if is_compiled(fn):
        made = forecast(fn, *args, **settings)
        return record_forecast(made), made
    describing = {name: settings.pop(name) for name in _DESCRIBING if name in settings}
    examined = examine(fn, tuple(args), **settings)
    made = forecast_examined(examined, **{'confirm': False, **describing})
    target = examined.target
    found = record_program(made, examined.program, target.mesh, examined.held, examined.results)
    return found, made


def record_program(
    made: Forecast,
    program: Program,
    mesh: Mesh,
    held: Sequence[HeldArray],
    results: Sequence[Any],
) -> Record:
    """The record of a program.

    Args:
      made: its forecast.
      program: the program, compiled or not.
      mesh: its mesh.
      held: the arrays of its arguments.
      results: the sharding of each result.
    """
    traced, memory = program.traced, None
    facts = find_facts(traced.jaxpr, axis_sizes(mesh))
    if program.compiled is not None:
        memory = read_memory(program.compiled, mesh.devices.flat[0].platform)
    donated = traced.donated if len(traced.donated) == len(held) else [False] * len(held)
    return dataclasses.replace(
        record_forecast(made),
        versions=_versions(made),
        files=_digests(facts.files),
        aliased=None if memory is None else memory.aliased,
        arguments=tuple(_arrays(held, donated)),
        results=tuple(_arrays(list_results(traced, results, mesh), None)),
        constraints=facts.constraints,
        collectives=facts.collectives,
        checkpoints=facts.checkpoints,
        precisions=facts.precisions,
        loops=facts.loops,
        rematerialized=tuple(_rematerialized(program)),
        recompiled=tuple(
            RecordedNote(what=finding.where, why=finding.message)
            for finding in made.findings
            if finding.kind in _RECOMPILING
        ),
    )


def record_forecast(made: Forecast) -> Record:
    """The record of a program of which only the forecast is known, without what its code says."""
    compiler, _, version = made.back_end_version.partition(' ')
    return Record(
        function=made.function,
        topology=made.topology,
        num_slices=made.num_slices,
        mesh=dict(made.mesh),
        versions={compiler: version} if version else {},
        fits=made.fits,
        peak=made.memory.peak,
        seconds=None if made.time is None else made.time.seconds,
        model_flops=made.model_flops,
        program_flops=made.program_flops,
        exchanges=record_exchanges(made.collectives),
        arguments=tuple(
            _array(row, spec_or_padded_str(row.spec), row.bytes_per_device) for row in made.arrays
        ),
        buffers=tuple(
            RecordedBuffer(
                array=live.array,
                bytes=live.nbytes,
                at=place_of(source_of(cause, live.source)),
            )
            for live, cause in made.memory.buffers[:_BUFFERS]
        ),
    )


def record_layouts(made: CallAudit, num_slices: int) -> Record:
    """The record of a program of which only the layouts of arguments and results count.

    Args:
      made: its audit.
      num_slices: the number of slices of its machine.
    """
    arguments, results = (
        tuple(_array(row, row.spec, row.bytes_per_device) for row in rows)
        for rows in (made.arguments, made.results)
    )
    return Record(
        function=made.function,
        topology=made.machine,
        num_slices=num_slices,
        mesh=made.mesh,
        versions={},
        fits=None,
        peak=0,
        exchanges=(),
        arguments=arguments,
        results=results,
    )


def _versions(made: Forecast) -> dict[str, str]:
    """The versions of the packages that a program depends on."""
    known = dict(package_versions())
    names = ['jax', 'jaxlib', *COMPILERS.get(made.back_end, ()), 'meshwright']
    found = {name: known[name] for name in names if name in known}
    for name in _LIBRARIES:
        if name in sys.modules:
            found[name] = metadata.version('dm-haiku' if name == 'haiku' else name)
    return found


def _digests(files: Iterable[str]) -> dict[str, str]:
    return {
        short_source(file): hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        for file in sorted(files)
        if Path(file).is_file()
    }


def _arrays(held: Sequence[HeldArray], donated: Sequence[bool] | None) -> Iterator[RecordedArray]:
    for i, array in enumerate(held):
        made = _array(array.row, spec_or_padded_str(array.row.spec), array.nbytes)
        rules = dict.fromkeys(repr(d.rule) for d in array.row.dimensions if d.rule)
        yield dataclasses.replace(
            made, donated=bool(donated and donated[i]), reason=', '.join(rules)
        )


def _array(row: PlanRow | AuditedArray, spec: str, nbytes: int) -> RecordedArray:
    return RecordedArray(
        path=row.path,
        shape=tuple(row.shape),
        dtype=row.dtype,
        spec=spec,
        bytes_per_device=nbytes,
    )


def record_exchanges(
    collectives: Sequence[tuple[Collective, Cause | None]],
) -> tuple[RecordedExchange, ...]:
    """The exchanges of a program, added up by everything that has a meaning.

    Args:
      collectives: the exchanges with their causes, those with the most bytes first.
    """
    sizes: dict[tuple[Any, ...], float] = collections.defaultdict(float)
    counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
    places: dict[tuple[Any, ...], At] = {}
    for one, cause in collectives:
        # The order of arrays that a compiler has joined says nothing.
        array = '' if cause is None else SEVERAL if len(one.arrays) > 1 else cause.array
        for dtype, share in _shares_by_type(one.arrays).items():
            key = one.kind, one.axes, one.network, dtype, array
            sizes[key] += share * one.total_bytes
            counts[key] += one.count
            if key not in places:
                places[key] = _place(one, cause)
    return tuple(
        RecordedExchange(
            kind=kind,
            axes=axes,
            network=network,
            dtype=dtype,
            array=array,
            bytes=round(size),
            count=counts[kind, axes, network, dtype, array],
            at=places[kind, axes, network, dtype, array],
        )
        for (kind, axes, network, dtype, array), size in sorted(sizes.items())
    )


def _place(one: Collective, cause: Cause | None) -> At:
    line = source_of(cause, one.source)
    return place_of(line, *(('', '') if cause is None else (cause.why, cause.rule)))


def _shares_by_type(arrays: Sequence[str]) -> Mapping[str, float]:
    """The share of the bytes of 'bf16[128,64]' and other arrays that each type has."""
    sizes: dict[str, float] = collections.defaultdict(float)
    for array in arrays:
        dtype, _, shape = array.partition('[')
        size = float(bits_of(dtype))
        for n in numbers_in(shape):
            size *= n
        sizes[dtype] += size
    total = sum(sizes.values())
    if not total:
        return dict.fromkeys(sizes or [''], 1 / max(len(sizes), 1))
    return {dtype: size / total for dtype, size in sizes.items()}


def _rematerialized(program: Program) -> Iterator[RecordedNote]:
    """What the compiler makes whole on every device, each array once."""
    sources: Mapping[int, str] = {}
    seen = set[str]()
    for text in program.warnings:
        if 'nvoluntary full rematerialization' not in text:
            continue
        found, frame = _REMATERIALIZED.search(text), _FRAME.search(text)
        what = found['array'] if found else text[:80]
        if program.compiled is not None and frame and not sources:
            sources = parse_hlo(read_text(program.compiled)).sources
        line = sources.get(int(frame[1]), '') if frame else ''
        why = f'from {found["before"]} to {found["after"]}' if found else text[:200]
        if what not in seen:
            seen.add(what)
            yield RecordedNote(what=what, why=f'{short_source(line)} {why}'.strip())
