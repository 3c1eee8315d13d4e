"""Reads from the text of HLO what a program sends and needs, and how its arguments are laid out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.dumps.folder import Stage
from meshwright.dumps.shardings import ShardedArray, describe_argument, read_layout
from meshwright.program.collectives import (
    Collective,
    Groups,
    MeshAxes,
    find_collectives,
    parse_groups,
)
from meshwright.program.hlo_text import HloProgram, Instruction, parse_hlo
from meshwright.program.peak_memory import PeakMemory, find_peak
from meshwright.program.visits import Visit, loops_of_unknown_length, visit_program
from meshwright.user_lines import user_line

# What marks the arrays that a program cuts by hand, in a shard_map.
_BY_HAND = ('SPMDFullToShardShape', 'xla.sdy.GlobalToLocalShape')
_CALLED = (
    *('calls', 'to_apply', 'body', 'condition'),
    *('branch_computations', 'called_computations'),
)


class Hlo(NamedTuple):
    """A program with what it runs.

    Attributes:
      program: the program.
      visits: its instructions, and how often they run.
      stage: how far it is compiled.
      name: the name of its module.
    """

    program: HloProgram
    visits: list[Visit]
    stage: Stage
    name: str


def read_hlo(text: str) -> Hlo:
    """Parses a module.

    Raises a ValueError if the text refers to what is not there, and errors of many types if it is
    damaged in other ways.
    """
    program = parse_hlo(text)
    _check_complete(program)
    visits = visit_program(program)
    name = re.match(r'HloModule ([^\s,]+)', text)
    return Hlo(program, visits, _stage_of(program), name[1] if name else 'module')


def exchanges_of(hlo: Hlo, mesh: MeshAxes | None) -> tuple[Collective, ...]:
    """The exchanges of a program, each with the line of the user's code."""
    program = hlo.program
    instructions = {i.name: i for i in _instructions(program)}
    found = []
    for collective in find_collectives(program, hlo.visits, mesh):
        source = user_line(program.stack_of(instructions[collective.instruction]))
        found.append(dataclasses.replace(collective, source=source or collective.source))
    return tuple(found)


def count_slices(hlo: Hlo) -> int:
    """The number of slices that the transfers of a program join, whose text is for one of them."""
    found = find_collectives(hlo.program, hlo.visits)
    return max((c.group_size for c in found if c.network == 'dcn'), default=1)


def groups_of(hlo: Hlo) -> Iterator[Groups]:
    """The groups of devices of every exchange."""
    for instruction in filter(_exchanges, _instructions(hlo.program)):
        yield parse_groups(instruction.attributes, hlo.program.num_devices)


def unknown_loops(hlo: Hlo) -> int:
    """The number of loops with exchanges whose length the text does not tell; they count once."""
    inside = {v.computation.name for v in hlo.visits if _exchanges(v.instruction)}
    loops = loops_of_unknown_length(hlo.program, hlo.visits)
    return sum(bool({*_reached(hlo.program, loop)} & inside) for loop in loops)


def peak_of(hlo: Hlo) -> PeakMemory | None:
    """What is in memory at the peak, by live ranges, or None if the program is not scheduled."""
    return find_peak(hlo.program) if hlo.stage == 'compiled' else None


def arguments_of(hlo: Hlo, mesh: MeshAxes | None) -> tuple[ShardedArray, ...]:
    """The arguments of a program that is not partitioned, in their order."""
    parameters = [i for i in hlo.program.entry.instructions.values() if i.opcode == 'parameter']
    described = []
    for one in sorted(parameters, key=lambda i: int(i.literal)):
        found = re.search(r'sdy\.sharding="((?:[^"\\]|\\.)*)"', one.attributes)
        other = re.search(r'\bsharding=(\{(?:[^{}]|\{[^{}]*\})*\})', one.attributes)
        text = found[1].replace('\\"', '"') if found else other[1] if other else ''
        layout = read_layout(text, mesh)
        name = one.op_name or one.name
        described += [describe_argument(name, array, layout) for array in one.outputs]
    return tuple(described)


def arguments_bytes(hlo: Hlo) -> int:
    """The size of the arguments of a program that is partitioned, in bytes."""
    entry = hlo.program.entry.instructions.values()
    return sum(a.padded_nbytes for i in entry if i.opcode == 'parameter' for a in i.outputs)


def _stage_of(program: HloProgram) -> Stage:
    """How far a program is compiled.

    Parameters keep their shardings after partitioning. Then there are exchanges, which before it
    only stand where a program cuts its arrays by hand.
    """
    if 'is_scheduled=true' in program.header:
        return 'compiled'
    instructions = list(_instructions(program))
    cut_by_hand = any(word in i.attributes for i in instructions for word in _BY_HAND)
    if '_spmd' in program.entry.name or (any(map(_exchanges, instructions)) and not cut_by_hand):
        return 'partitioned'
    parameters = [i for i in program.entry.instructions.values() if i.opcode == 'parameter']
    is_sharded = any(re.search(r'\bsharding=', i.attributes) for i in parameters)
    asks = 'xla.sdy.meshes' in program.header or is_sharded
    return 'not partitioned' if asks or program.num_devices > 1 else 'partitioned'


def _check_complete(program: HloProgram) -> None:
    """Raises a ValueError if an instruction refers to what is not there."""
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            names = [n for n in instruction.operands if n not in computation.instructions]
            for attribute in _CALLED:
                if attribute in instruction.attributes:
                    called = instruction.called(attribute)
                    names += [n for n in called if n not in program.computations]
            if names:
                raise ValueError(
                    f'the text is cut off or damaged: {instruction.name!r} uses {names[0]!r}, '
                    'which is not there'
                )


def _instructions(program: HloProgram) -> Iterator[Instruction]:
    for computation in program.computations.values():
        yield from computation.instructions.values()


def _exchanges(instruction: Instruction) -> bool:
    return bool(re.search(r'\b(replica_groups|source_target_pairs)=', instruction.attributes))


def _reached(program: HloProgram, instruction: Instruction) -> Iterator[str]:
    """The computations that an instruction runs, and those that they run."""
    for attribute in _CALLED:
        for name in instruction.called(attribute):
            yield name
            for inner in program.computations[name].instructions.values():
                yield from _reached(program, inner)
