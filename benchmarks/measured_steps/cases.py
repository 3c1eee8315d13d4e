"""Measured rows with the loads of the programs that stand for them, as the fit takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

from meshwright.time import KernelWork, Machine, Work, describe_machine
from meshwright.time.layers import Layers
from meshwright.time.loads import find_loads
from meshwright.time.work import Origin
from partitioning.hardware import CHIPS

from .fitting import Case
from .program import Program
from .rebuilding import find_listed, list_programs, rebuild
from .records import with_copies
from .rows import MeasuredRow, load_rows

_RATES = {'Gb': 1e9 / 8, 'Tb': 1e12 / 8, 'GB': 1e9}  # in bytes/s
_GPUS_PER_HOST = 8


def list_cases(
    traced: Mapping[str, Mapping[str, Any]], compiled: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Case], dict[str, str]]:
    """Returns the cases of all rows, and for each row without a case why it has none.

    A row has one case for its traced program, and one for its compiled program if there is one.
    """
    cases: list[Case] = []
    reasons: dict[str, str] = {}
    for row in load_rows():
        program = rebuild(row)
        if isinstance(program, str):
            reasons[row.name] = program
            continue
        name = find_listed(row, program)
        records: dict[Origin, Any] = {'jaxpr': traced.get(name), 'compiler': compiled.get(name)}
        found = [
            _make_case(row, program, name, record, origin)
            for origin, record in records.items()
            if record and 'device_bytes' in record
        ]
        if not found:
            reasons[row.name] = 'its program could not be traced'
        cases += found
    return cases, reasons


def family_of(row: MeasuredRow) -> str:
    """The chip, framework and model of a row, without batch and size of the machine."""
    framework = row['framework'].split()[0]
    length = f'{row["seq_len"] // 1024}k'
    return f'{row.chip} {framework} {row.params_total / 1e9:.3g}B x {length}'


def software_of(row: MeasuredRow) -> str:
    """The software of a row whose programs a compiler of GPUs made in another way than ours."""
    framework = row['framework'].split()[0]
    if CHIPS[row.chip].platform != 'gpu' or framework == 'MaxText':
        return ''
    compiled = (row.settings.get('software') or {}).get('torch_compile')
    return f'{framework} without compiler' if compiled is False else framework


def work_of(record: Mapping[str, Any], copies: int, from_copies: int, origin: Origin) -> Work:
    """Returns the work of a program, on a machine with another number of copies of the model.

    The program was made for `from_copies` over the slower network, and the machine has `copies`.
    """
    clock = CHIPS[record['chip']].clock_hz
    cycles = record.get('cycles') or {}
    products = cycles.get('matmul', 0)
    estimated = clock is not None and products > 0
    return Work(
        origin=origin,
        chip=record['chip'],
        matmul_flops=record['matmul_flops'],
        matmul_seconds=products / clock if clock and estimated else None,
        other_seconds=(sum(cycles.values()) - products) / clock if clock and estimated else None,
        other_bytes=record['device_bytes'],
        kernels=tuple(KernelWork(**kernel) for kernel in record['kernels']),
        collectives=tuple(with_copies(record['collectives'], from_copies, copies)),
        host_bytes=record['host_bytes'],
        layers=_read_layers(record.get('layers')),
    )


def _read_layers(entry: Mapping[str, Any] | None) -> Layers | None:
    return entry and Layers(width=entry['width'], kinds=tuple(entry['kinds']))


def machine_of(row: MeasuredRow, program: Program) -> Machine:
    """Describes the machine of a row."""
    machine = _describe(program)
    bandwidth = network_bandwidth_of(row)
    return dataclasses.replace(machine, network_bandwidth=bandwidth) if bandwidth else machine


def network_bandwidth_of(row: MeasuredRow) -> float | None:
    """A GPU's share of the network of its host in bytes/s, if the row says it."""
    text = row['hardware']['topology_source'] or ''
    found = re.search(r'([\d.]+) (Gb|Tb|GB)/s (?:\w+ )?a (VM|node|GPU)', text)
    if found is None or CHIPS[row.chip].platform != 'gpu':
        return None
    share = 1 if found[3] == 'GPU' else _GPUS_PER_HOST
    return float(found[1]) * _RATES[found[2]] / share


def _make_case(
    row: MeasuredRow, program: Program, name: str, record: Mapping[str, Any], origin: Origin
) -> Case:
    compiled = list_programs()[name]
    work = work_of(record, program.num_copies, compiled.num_copies, origin)
    chip = CHIPS[row.chip]
    counts = row['check']['gflop_per_token']
    tokens = row['global_batch'] * row['seq_len'] / row.num_devices
    return Case(
        name=row.name,
        chip=row.chip,
        platform=chip.platform,
        group=row['group'],
        family=family_of(row),
        software=software_of(row),
        seconds=row.step_seconds,
        flops=1e9 * counts['causal_attention'] * tokens,
        peak=chip.peak_flops_per_device,
        loads=find_loads(work, machine_of(row, program)),
        layers=work.layers,
        dense=row['class'] == 'dense',
        superseded=row.superseded,
        origin=origin,
    )


@functools.cache
def _describe(program: Program) -> Machine:
    with contextlib.redirect_stdout(sys.stderr):
        machine = describe_machine(program.mesh().build())
    assert machine is not None
    return machine
