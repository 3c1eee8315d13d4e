"""Compact records of the programs that were measured, committed next to the measurements.

A record has what the step-time model reads of a trace that `own_programs` has stored: products by
size, kernels, bytes, and exchanges as seconds at the peak rate of their links.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.report.plain_values import from_plain
from meshwright.time import Work
from meshwright.time.loads import ExchangeLoad, Loads, add_up, find_loads

from .own_cases import describe_own_machine, mesh_of
from .own_programs import read_found
from .records import record_work, write_records
from .rows import MeasuredRow

OWN = Path(__file__).with_name('own_steps.json')
# What rows of one program have in common: all but the number of TPU slices, which are copies.
_PROGRAM = (
    *('framework', 'model', 'seq_len', 'per_device_batch', 'gradient_accumulation', 'dtype'),
    *('optimizer', 'remat', 'attention', 'scan_layers', 'quantization', 'other_settings'),
)


def keep_records(rows: Sequence[MeasuredRow]) -> None:
    """Writes the records of all rows whose programs the store has, next to those that it has not.

    A row whose program was traced for another number of slices gets the record of that program.
    """
    records = read_own() | dict(_stored(rows))
    traced = {
        row.name: row
        for row in rows
        if row.name in records and 'slices_of' not in records[row.name]
    }
    for row in rows:
        if row.name in traced:
            continue
        others = [other for other in traced.values() if _differ_in_slices(row, other)]
        if others:
            other = max(others, key=lambda other: other.num_slices)
            copied = with_slices(records[other.name], other.num_slices, row.num_slices)
            records[row.name] = copied | {'slices_of': other.name}
    write_records(records, OWN)


def read_own() -> dict[str, dict[str, Any]]:
    """Returns the committed records, by the name of the row."""
    return json.loads(OWN.read_text()) if OWN.exists() else {}


def loads_of(record: Mapping[str, Any], work: Work) -> Loads:
    """The loads of a record, with `work` as `cases.work_of` reads it."""
    exchanges = tuple(ExchangeLoad(**entry) for entry in record['exchanges'])
    counts = {name: record[name] for name in ('num_separate', 'num_processes')}
    return add_up(work, exchanges, **counts)


def with_slices(record: Mapping[str, Any], from_slices: int, slices: int) -> dict[str, Any]:
    """The record of a program whose slices have copies of the model, with other such slices.

    The exchanges between slices are rings over all of them.
    """
    exchanges = [
        _over_slices(entry, from_slices, slices) if entry['slow'] else entry
        for entry in record['exchanges']
        if slices > 1 or not entry['slow']
    ]
    hosts = record['num_processes'] * slices // from_slices
    return {
        **record,
        'exchanges': exchanges,
        'num_separate': slices,
        'num_processes': hosts,
    }


def _over_slices(entry: Mapping[str, Any], from_slices: int, slices: int) -> dict[str, Any]:
    factor = (1 - 1 / slices) / (1 - 1 / from_slices)
    phases = entry['phases'] * (slices - 1) // (from_slices - 1)
    return {**entry, 'seconds': entry['seconds'] * factor, 'phases': phases}


def _differ_in_slices(row: MeasuredRow, other: MeasuredRow) -> bool:
    """Whether two rows have one program, on another number of slices with a copy on each."""
    if other.num_slices == 1 or row.chip != other.chip:
        return False
    for one in (row, other):
        if set(one['parallelism']['dcn']) - {'data'}:
            return False
    if row['parallelism']['ici'] != other['parallelism']['ici']:
        return False
    devices = [one.num_devices // one.num_slices for one in (row, other)]
    alike = (row.settings.get(name) == other.settings.get(name) for name in _PROGRAM)
    return devices[0] == devices[1] and all(alike)


def _stored(rows: Sequence[MeasuredRow]) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in rows:
        found = read_found(row)
        if not isinstance(found, str):
            yield row.name, _make_record(row, found)


def _make_record(row: MeasuredRow, found: Mapping[str, Any]) -> dict[str, Any]:
    work = from_plain(Work, found['work'], 'work')
    loads = find_loads(work, describe_own_machine(row, mesh_of(found)))
    record = record_work(dataclasses.replace(work, collectives=()))
    del record['collectives']
    return record | {
        'exchanges': [dataclasses.asdict(exchange) for exchange in loads.exchanges],
        'num_separate': loads.num_separate,
        'num_processes': loads.num_processes,
        'parameters': found['parameters'],
        'peak_by_formula': found['peak_by_formula'],
        'cpu_seconds': round(found['seconds']['all']),
    }
