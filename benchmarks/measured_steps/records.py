"""Compact records of compiled and of traced programs, committed next to the measurements.

A record has what the compiler says and what is counted in the traced step, per device and step:
enough to estimate the time of a step and its memory again without compiling. The record of a traced
program says what it has to do on each device, and needs no compiler.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.jaxpr import trace_function
from meshwright.program.collectives import Collective, MeshAxes
from meshwright.program.costs import costs_of_text
from meshwright.time import Work, estimate_work
from meshwright.time.layers import Layers, describe_layers
from partitioning.hardware import CHIPS, parse_topology
from train.running.programs import partition_train_step
from train.running.run import prepare

from .compiling import read_text
from .program import Program
from .rebuilding import list_programs

RECORDS = Path(__file__).with_name('compiled_steps.json')
TRACED = Path(__file__).with_name('traced_steps.json')
# The settings of a program that a reader looks for; the others follow from the row.
_SETTINGS = ('topology', 'num_slices', 'axes', 'dcn', 'batch_size', 'output_chunks')
# What exchanges have in common that a record does not tell apart.
_KIND = ('kind', 'network', 'axes', 'group_size', 'asynchronous', 'places')
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


def make_record(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the compact record of what the store has about a program.

    Without code for the devices there are no estimates, and exchanges that overlap with others
    appear several times in the text, so the record then has only the memory.
    """
    program = found['program']
    record = {name: program[name] for name in _SETTINGS}
    record |= {name: found[name] for name in _KEPT if name in found}
    for name in ('error', 'error_with_whole_logits'):
        if name in found:
            record[name] = found[name].strip().splitlines()[0][:300]
    record['has_estimates'] = found['stored_as'] == found['name'] and 'memory' in found
    if not record['has_estimates']:
        return record
    mesh = MeshAxes(sizes=found['mesh'], slices=found['slices'])
    costs = costs_of_text(read_text(found['stored_as']), mesh=mesh, chip=found['chip'])
    return record | {
        'cycles': cycles_by_kind(costs.operations),
        'device_bytes': costs.device_bytes,
        'host_bytes': costs.host_bytes,
        'kernels': found['kernel_work'],
        'collectives': [_entry(c) for c in _merge_equal(costs.collectives)],
    }


def read_records(path: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Returns the committed records, by the name of the program."""
    return json.loads(path.read_text())


def write_records(records: Mapping[str, Any], path: Path = RECORDS) -> None:
    """Writes records, one program per line."""
    lines = [f'{json.dumps(name)}: {json.dumps(records[name])}' for name in sorted(records)]
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def trace_all() -> Iterator[tuple[str, dict[str, Any]]]:
    """Traces each program; yields its name and what it has to do."""
    for name, program in list_programs().items():
        yield name, record_work(trace_work(program))


def trace_work(program: Program) -> Work:
    """Returns the work of a program on each device, from its trace."""
    with contextlib.redirect_stdout(sys.stderr):
        run = prepare(program.train_config())
    traced = trace_function(partition_train_step(run), run.plan.abstract_state, dict(run.batch))
    chip = parse_topology(program.topology)[0]
    return estimate_work(traced, chip, layers=describe_layers(traced))


def record_work(work: Work) -> dict[str, Any]:
    """Returns work as JSON can have it, with the exchanges of one kind together."""
    return {
        'chip': work.chip,
        'matmul_flops': work.matmul_flops,
        'device_bytes': work.other_bytes,
        'host_bytes': work.host_bytes,
        'kernels': [dataclasses.asdict(kernel) for kernel in work.kernels],
        'collectives': [_entry(c) for c in merge_kinds(work.collectives)],
        'layers': work.layers and _record_layers(work.layers),
    }


def _record_layers(layers: Layers) -> dict[str, Any]:
    """The products of a step: each its sizes, FLOPs, bytes, and its type if that has 8 bits."""
    products = [
        [p.rows, p.summed, p.columns, p.flops, p.nbytes, *([p.dtype] if p.dtype else [])]
        for p in layers.products
    ]
    return {'width': layers.width, 'kinds': layers.kinds, 'products': products}


def read_collectives(entries: Iterable[Mapping[str, Any]]) -> Iterator[Collective]:
    """Yields the collectives of a record, each of which stands for several."""
    for entry in entries:
        tuples = {name: tuple(entry.get(name, ())) for name in ('axes', 'arrays', 'places')}
        yield Collective(**{'op_name': '', 'source': ''} | entry | tuples)


def with_copies(
    entries: Iterable[Mapping[str, Any]], from_copies: int, copies: int, chip: str
) -> Iterator[Collective]:
    """Yields the collectives of a record with another number of copies of the model.

    The slices or hosts of the program each have whole copies, which the axis 'data' joins by a
    ring. Exchanges between slices are listed by themselves. Those between hosts of GPUs are not, so
    that their groups have a copy of the model, or several, of each host.
    """
    hosts = CHIPS[chip].platform == 'gpu'
    for one in read_collectives(entries):
        if one.network == 'dcn' or (hosts and 'data' in one.axes):
            size = one.group_size // from_copies * copies
            factor = (1 - 1 / size) / (1 - 1 / one.group_size)
            one = dataclasses.replace(one, group_size=size, wire_bytes=one.wire_bytes * factor)
        yield one


def cycles_by_kind(operations: Iterable[Any]) -> dict[str, int]:
    """Returns the estimated cycles of each kind of operation; the first have the most."""
    cycles = collections.Counter[str]()
    for operation in operations:
        cycles[operation.kind] += operation.cycles
    return dict(cycles.most_common())


def merge_kinds(collectives: Iterable[Collective]) -> Iterator[Collective]:
    """Yields one exchange of the mean size for all of a kind along the same axes."""
    for members in _group(collectives, _KIND):
        count = sum(c.count for c in members)
        means = {
            name: sum(getattr(c, name) * c.count for c in members) / count
            for name in ('wire_bytes', 'flops_meanwhile', 'opposite_bytes')
        }
        merged = {'count': count, 'arrays': (), 'op_name': '', 'source': ''}
        yield dataclasses.replace(members[0], **merged, **means)


def _merge_equal(collectives: Iterable[Collective]) -> list[Collective]:
    """Equal collectives together; the first send the most."""
    groups = _group(collectives, (*_KIND, 'arrays', 'wire_bytes'))
    merged = [dataclasses.replace(g[0], count=sum(c.count for c in g)) for g in groups]
    return sorted(merged, key=lambda c: -c.total_bytes)


def _group(collectives: Iterable[Collective], names: Iterable[str]) -> Any:
    """Groups of collectives that have the same values of some fields."""
    groups: dict[Any, list[Collective]] = collections.defaultdict(list)
    for c in collectives:
        groups[tuple(getattr(c, name) for name in names)].append(c)
    return groups.values()


def _entry(one: Collective) -> dict[str, Any]:
    names = (*_KIND, 'arrays', 'wire_bytes', 'count')
    entry = {name: getattr(one, name) for name in names}
    return entry if one.places else {k: v for k, v in entry.items() if k != 'places'}
