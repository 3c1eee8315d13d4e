"""Measured rows with the loads of the programs that stand for them, as the fit takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from meshwright.time import KernelWork, Machine, Work, describe_machine, estimate_step_time
from meshwright.time.layers import Layers, Product
from meshwright.time.loads import Loads, find_loads
from meshwright.time.step_model import StepTime
from meshwright.time.work import Origin
from partitioning.hardware import CHIPS, describe_topology

from .fitting import Case
from .own_records import loads_of
from .program import Program
from .rebuilding import find_listed, list_programs, rebuild
from .records import with_copies
from .rows import MeasuredRow, load_rows, network_bandwidth_of


def list_cases(
    traced: Mapping[str, Mapping[str, Any]],
    compiled: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Case], dict[str, str]]:
    """Returns the cases of all rows, and for each row without a case why it has none.

    A row has one case for its traced program, which is the measured one if that was recorded and
    otherwise ours, and one for our compiled program if there is one.

    The records of ours are by the name of the program, and `own` by the name of the row.
    """
    listed = list_programs()
    cases: list[Case] = []
    reasons: dict[str, str] = {}
    for row in load_rows():
        if record := own.get(row.name):
            cases.append(_case_of_own(row, record))
        program = rebuild(row)
        if isinstance(program, str):
            if not record:
                reasons[row.name] = program
            continue
        name = find_listed(row, program)
        records: dict[Origin, Any] = {'jaxpr': traced.get(name), 'compiler': compiled.get(name)}
        if records['jaxpr'] and records['compiler']:  # what no compiler counts is from the trace
            shared = {entry: records['jaxpr'][entry] for entry in ('kernels', 'layers')}
            records['compiler'] = records['compiler'] | shared
        found = [
            _make_case(row, program, listed[name], record, origin)
            for origin, record in records.items()
            if record and 'device_bytes' in record and not (origin == 'jaxpr' and row.name in own)
        ]
        if not found and row.name not in own:
            reasons[row.name] = 'its program could not be traced'
        cases += found
    return cases, reasons


def family_of(row: MeasuredRow) -> str:
    """The chip and the model of a row, without framework, batch and size of the machine."""
    return f'{row.chip} {row.params_total / 1e9:.3g}B'


def framework_of(row: MeasuredRow) -> str:
    """The framework of a row with its version, or if the row does not say it, with its month."""
    name = row['framework'].split()[0]
    software = row.settings.get('software') or {}
    if version := software.get('maxtext') or software.get('container'):
        return f'{name} {version[:24]}'
    if software.get('torch_compile') is not None:
        return f'{name} {"compiled" if software["torch_compile"] else "eager"}'
    return f'{name} {row["source"]["date"][:7]}'


def software_of(row: MeasuredRow) -> str:
    """The software of a row whose programs differ from ours, as in `fitting.SOFTWARE`, or ''."""
    name, platform = row['framework'].split()[0], CHIPS[row.chip].platform
    if name == 'MaxText':
        return ''
    if name == 'axlearn':
        return f'axlearn on {platform.upper()}s'
    compiled = (row.settings.get('software') or {}).get('torch_compile')
    return f'{name}, {"eager" if compiled is False else "compiled"}'


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
        collectives=tuple(with_copies(record['collectives'], from_copies, copies, record['chip'])),
        host_bytes=record['host_bytes'],
        layers=_read_layers(record.get('layers')),
    )


def _read_layers(entry: Mapping[str, Any] | None) -> Layers | None:
    if entry is None:
        return None
    products = tuple(
        Product(rows=m, summed=k, columns=n, flops=flops, nbytes=nbytes, dtype=''.join(dtype))
        for m, k, n, flops, nbytes, *dtype in entry['products']
    )
    return Layers(width=entry['width'], kinds=tuple(entry['kinds']), products=products)


def machine_of(row: MeasuredRow, program: Program) -> Machine:
    """Describes the machine of a row."""
    machine = _describe(program)
    bandwidth = network_bandwidth_of(row)
    return dataclasses.replace(machine, network_bandwidth=bandwidth) if bandwidth else machine


def _make_case(
    row: MeasuredRow,
    program: Program,
    compiled: Program,
    record: Mapping[str, Any],
    origin: Origin,
) -> Case:
    work = work_of(record, program.num_copies, compiled.num_copies, origin)
    return _case_of(row, work, find_loads(work, machine_of(row, program)))


def _case_of_own(row: MeasuredRow, record: Mapping[str, Any]) -> Case:
    work = work_of({**record, 'collectives': ()}, 1, 1, 'jaxpr')
    return dataclasses.replace(_case_of(row, work, loads_of(record, work)), is_own=True)


def _case_of(row: MeasuredRow, work: Work, loads: Loads) -> Case:
    chip = CHIPS[row.chip]
    counts = row['check']['gflop_per_token']
    tokens = row['global_batch'] * row['seq_len'] / row.num_devices
    return Case(
        name=row.name,
        chip=row.chip,
        platform=chip.platform,
        group=row['group'],
        family=family_of(row),
        framework=framework_of(row),
        software=software_of(row),
        seconds=row.step_seconds,
        flops=1e9 * counts['causal_attention'] * tokens,
        peak=chip.peak_flops_per_device,
        loads=loads,
        layers=work.layers,
        dense=row['class'] == 'dense',
        superseded=row.superseded,
        origin=work.origin,
    )


@functools.cache
def _describe(program: Program) -> Machine:
    with contextlib.redirect_stdout(sys.stderr):
        machine = describe_machine(program.mesh().build())
    assert machine is not None
    return machine


# Steps that this project measured itself, on one GPU, to which no constant is fitted. They have no
# exchanges and wait for no other device, so they show whether the constants of products and of
# memory are what their names say, or hide other costs. `held_steps.json` has what the programs of
# `train_step.py --forecast=h100:1x1` have to do; `results/train_steps.md` says how they were
# measured.

HELD = Path(__file__).with_name('held_steps.json')


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldStep:
    """A step that was measured, with its forecast.

    Attributes:
      name: the model and the loop, such as '125m plain'.
      origin: 'compiler' if the program was compiled, 'jaxpr' if it was traced.
      measured: the time of a step in seconds.
      time: the forecast by the committed constants.
    """

    name: str
    origin: Origin
    measured: float
    time: StepTime

    @property
    def error(self) -> float:
        """The relative error of the forecast."""
        return self.time.seconds / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time is in the range of the forecast."""
        return self.time.low <= self.measured <= self.time.high


def forecast_held() -> Iterator[HeldStep]:
    """Yields the forecasts of the steps: each by formula, and from its compiled program."""
    entries = json.loads(HELD.read_text())
    devices = np.array(describe_topology(entries['topology']).devices)
    machine = describe_machine(Mesh(devices, ('data',)))
    assert machine is not None
    origins: tuple[Origin, ...] = 'jaxpr', 'compiler'
    for name, entry in entries['steps'].items():
        for origin in origins:
            time = estimate_step_time(work_of(entry[origin], 1, 1, origin), machine)
            assert time is not None
            yield HeldStep(name=name, origin=origin, measured=entry['seconds'], time=time)
