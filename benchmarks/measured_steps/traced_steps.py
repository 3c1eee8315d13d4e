"""What the rebuilt steps have to do on each device, found out without a compiler.

The work of each program is committed in `traced_steps.json`, in the same form as the records of
compiled programs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.jaxpr import trace_function
from meshwright.program.collectives import Collective
from meshwright.time import Work, estimate_work
from partitioning.hardware import parse_topology

from .program import Program
from .rebuilding import list_programs

TRACED = Path(__file__).with_name('traced_steps.json')


def trace_all() -> Iterator[tuple[str, dict[str, Any]]]:
    """Traces each program; yields its name and what it has to do."""
    for name, program in list_programs().items():
        yield name, record_work(trace_work(program))


def trace_work(program: Program) -> Work:
    """Returns the work of a program on each device, from its trace."""
    from train.running.programs import partition_train_step
    from train.running.run import prepare

    with contextlib.redirect_stdout(sys.stderr):
        run = prepare(program.train_config())
    traced = trace_function(partition_train_step(run), run.plan.abstract_state, dict(run.batch))
    return estimate_work(traced, parse_topology(program.topology)[0])


def record_work(work: Work) -> dict[str, Any]:
    """Returns work as JSON can have it, with the exchanges of one kind together."""
    return {
        'chip': work.chip,
        'matmul_flops': work.matmul_flops,
        'device_bytes': work.other_bytes,
        'host_bytes': work.host_bytes,
        'kernels': [dataclasses.asdict(kernel) for kernel in work.kernels],
        'collectives': list(_together(work.collectives)),
    }


def read_traced() -> dict[str, dict[str, Any]]:
    """Reads the committed work of programs, by their names."""
    return json.loads(TRACED.read_text())


def write_traced(records: Mapping[str, Any]) -> None:
    """Writes the work of programs, one program per line."""
    lines = [f'{json.dumps(name)}: {json.dumps(records[name])}' for name in sorted(records)]
    TRACED.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def _together(collectives: tuple[Collective, ...]) -> Iterator[dict[str, Any]]:
    """One entry for all exchanges of a kind along the same axes, of their mean size."""
    groups: dict[tuple[Any, ...], list[Collective]] = collections.defaultdict(list)
    for c in collectives:
        groups[c.kind, c.network, c.axes, c.group_size, c.asynchronous].append(c)
    for (kind, network, axes, group_size, asynchronous), members in groups.items():
        count = sum(c.count for c in members)
        yield {
            'kind': kind,
            'network': network,
            'axes': list(axes),
            'group_size': group_size,
            'asynchronous': asynchronous,
            'arrays': [],
            'wire_bytes': sum(c.total_bytes for c in members) / count,
            'count': count,
        }
