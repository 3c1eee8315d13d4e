"""Compact records of compiled programs, which are committed next to the measurements.

A record has what the compiler says and what is counted in the traced step, per device and step:
enough to estimate the time of a step and its memory again without compiling.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.program.collectives import Collective, MeshAxes
from meshwright.program.costs import ProgramCosts, costs_of_text

from .compiling import read_all, read_text

RECORDS = Path(__file__).with_name('compiled_steps.json')
# The settings of a program that a reader looks for; the others follow from the row.
_SETTINGS = ('topology', 'num_slices', 'axes', 'dcn', 'batch_size', 'output_chunks')
_KEPT = (
    'fits',
    'chip',
    'mesh',
    'slices',
    'memory',
    'memory_limit',
    'state_bytes',
    'model_flops',
    'program_flops',
    'matmul_flops',
    'compiler_options',
    'trace_seconds',
    'compile_seconds',
    'compile_bytes',
    'versions',
)


def make_records(store: Path) -> dict[str, dict[str, Any]]:
    """Returns the compact record of each program of a store, by name."""
    return {found['name']: make_record(found, store) for found in read_all(store)}


def make_record(found: Mapping[str, Any], store: Path) -> dict[str, Any]:
    """Returns the compact record of a program.

    Args:
      found: what the store has about the program.
      store: the store, which also has its text.

    Returns:
      The record. Without code for the devices there are no estimates, and exchanges that overlap
      with others appear several times in the text, so the record then has only the memory.
    """
    program = found['program']
    record = {name: program[name] for name in _SETTINGS}
    record |= {name: found[name] for name in _KEPT if name in found}
    for name in ('error', 'error_with_whole_logits'):
        if name in found:
            record[name] = _first_line(found[name])
    record['has_estimates'] = found['stored_as'] == found['name'] and 'memory' in found
    if not record['has_estimates']:
        return record
    mesh = MeshAxes(sizes=found['mesh'], slices=found['slices'])
    costs = costs_of_text(read_text(found['stored_as'], store), mesh=mesh, chip=found['chip'])
    return record | {
        'cycles': _cycles(costs),
        'device_bytes': costs.device_bytes,
        'host_bytes': costs.host_bytes,
        'kernels': found['kernel_work'],
        'collectives': list(_collectives(costs)),
    }


def read_records() -> dict[str, dict[str, Any]]:
    """Returns the committed records, by the name of the program."""
    return json.loads(RECORDS.read_text())


def write_records(records: Mapping[str, Any], path: Path = RECORDS) -> None:
    """Writes records, one program per line."""
    lines = [f'{json.dumps(name)}: {json.dumps(records[name])}' for name in sorted(records)]
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def read_collectives(record: Mapping[str, Any]) -> Iterator[Collective]:
    """Yields the collectives of a record, each of which stands for equal ones."""
    for entry in record['collectives']:
        fields = entry | {'axes': tuple(entry['axes']), 'arrays': tuple(entry['arrays'])}
        yield Collective(**fields, op_name='', source='')


def with_copies(collectives: Iterator[Collective], from_copies: int, copies: int) -> Iterator[Any]:
    """Yields the collectives of a program with another number of copies of the model.

    Args:
      collectives: those of a program whose slices each have a whole copy.
      from_copies: the number of copies in that program.
      copies: the number of copies, which the slower network joins by a ring.
    """
    for one in collectives:
        if one.network == 'dcn' and copies != from_copies:
            factor = (1 - 1 / copies) / (1 - 1 / from_copies)
            one = dataclasses.replace(one, group_size=copies, wire_bytes=one.wire_bytes * factor)
        yield one


def _cycles(costs: ProgramCosts) -> dict[str, int]:
    """The estimated cycles by kind of operation."""
    cycles: dict[str, int] = collections.defaultdict(int)
    for operation in costs.operations:
        cycles[operation.kind] += operation.cycles
    return dict(cycles)


def _collectives(costs: ProgramCosts) -> Iterator[dict[str, Any]]:
    """Equal collectives together, those that send the most first."""
    counts: dict[tuple[Any, ...], int] = collections.defaultdict(int)
    for c in costs.collectives:
        size = (c.kind, c.network, c.axes, c.group_size, c.asynchronous, c.arrays, c.wire_bytes)
        counts[size] += c.count
    for key, count in sorted(counts.items(), key=lambda item: -item[0][-1] * item[1]):
        kind, network, axes, group_size, asynchronous, arrays, wire_bytes = key
        yield {
            'kind': kind,
            'network': network,
            'axes': list(axes),
            'group_size': group_size,
            'asynchronous': asynchronous,
            'arrays': list(arrays),
            'wire_bytes': wire_bytes,
            'count': count,
        }


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:300]
