"""The instructions that a program runs, each with the number of times that it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.program.hlo_text import Computation, HloProgram, Instruction


class Visit(NamedTuple):
    """An instruction that a program runs.

    Attributes:
      instruction: the instruction.
      computation: the computation that it is part of.
      times: how often it runs in one call of the program.
    """

    instruction: Instruction
    computation: Computation
    times: int


def visit_program(program: HloProgram) -> list[Visit]:
    """Returns the instructions of a program in the order in which they first run.

    The bodies of loops and calls are entered. A fusion is one operation, and is not entered.
    Of the branches of a conditional, the one with the most estimated cycles is entered, or the
    longest one if there are no estimates. A loop whose length the text does not tell counts once.
    """
    return list(_visit(program, program.entry, 1))


def loops_of_unknown_length(program: HloProgram, visits: list[Visit]) -> tuple[Instruction, ...]:
    """The loops of a program that count once, because its text does not tell their length."""
    loops = {v.instruction.name: v.instruction for v in visits if v.instruction.opcode == 'while'}
    return tuple(loop for loop in loops.values() if _trip_count(program, loop) is None)


def cycles_of(instruction: Instruction) -> int | None:
    """The compiler's estimate of the cycles of an instruction, or None if it has none."""
    found = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    return int(found[1]) if found else None


def _visit(program: HloProgram, computation: Computation, times: int) -> Iterator[Visit]:
    for instruction in computation.instructions.values():
        yield Visit(instruction, computation, times)
        for name, repeats in _entered(program, instruction):
            yield from _visit(program, program.computations[name], times * repeats)


def _entered(program: HloProgram, instruction: Instruction) -> list[tuple[str, int]]:
    """The computations that an instruction runs, and how often."""
    if instruction.opcode == 'while':
        (body,), count = instruction.called('body'), _trip_count(program, instruction)
        return [(body, 1 if count is None else count)]
    if instruction.opcode in ('call', 'call-start'):
        return [(name, 1) for name in instruction.called('to_apply')]
    if instruction.opcode == 'async-start':
        return [(name, 1) for name in instruction.called('calls')]
    if instruction.opcode == 'custom-call':  # the sparse cores of TPUs exchange data in them
        called = instruction.called('called_computations')
        return [(name, 1) for name in called if _exchanges(program.computations[name])]
    if instruction.opcode == 'conditional':
        names = instruction.called('branch_computations') or (
            *instruction.called('true_computation'),
            *instruction.called('false_computation'),
        )

        def length(name: str) -> tuple[int, int]:
            visits = list(_visit(program, program.computations[name], 1))
            cycles = sum((cycles_of(v.instruction) or 0) * v.times for v in visits)
            return cycles, sum(v.times for v in visits)

        return [(max(names, key=length), 1)]
    return []


def _exchanges(computation: Computation) -> bool:
    return any('replica_groups=' in i.attributes for i in computation.instructions.values())


def _trip_count(program: HloProgram, loop: Instruction) -> int | None:
    """The number of iterations of a loop, or None if the text does not tell it.

    The text of CPU and GPU programs has it. In programs for TPUs, it is the constant with which the
    condition compares the counter, which starts at 0.
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(found[1])
    comparison = program.computations[loop.called('condition')[0]]
    constants = [
        int(i.literal)
        for i in comparison.instructions.values()
        if i.opcode == 'constant' and i.literal.isdigit()
    ]
    below = comparison.root.opcode == 'fusion' or 'direction=LT' in comparison.root.attributes
    return constants[0] if below and len(constants) == 1 else None
