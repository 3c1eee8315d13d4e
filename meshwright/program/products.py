"""The FLOPs of the matrix products of a compiled program, on each device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from meshwright.program.hlo_text import Computation, HloProgram, Instruction
from meshwright.program.operations import opcodes_of
from meshwright.program.visits import visit_program


def count_dot_flops(program: HloProgram) -> float | None:
    """The FLOPs of what each device multiplies in one call.

    Every device of a program multiplies arrays of these shapes, whether others multiply the same or
    not. A loop whose length the text does not tell counts once.

    Args:
      program: the compiled program.

    Returns:
      The FLOPs; None if the program has products in another form than dots, such as convolutions
      and kernels, whose FLOPs its text does not tell.
    """
    visits = visit_program(program)
    if any({'convolution', 'custom-call'} & {*opcodes_of(program, v.instruction)} for v in visits):
        return None
    return sum(v.times * _flops(program, v.instruction, v.computation) for v in visits)


def _flops(program: HloProgram, instruction: Instruction, computation: Computation) -> float:
    """The FLOPs of an instruction, or of those inside of a fusion."""
    return sum(
        _flops_of_dot(dot, inside) for dot, inside in _dots(program, instruction, computation)
    )


def _dots(
    program: HloProgram, instruction: Instruction, computation: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    if instruction.opcode == 'dot':
        yield instruction, computation
    for name in instruction.called('calls') if instruction.opcode == 'fusion' else ():
        inside = program.computations[name]
        for inner in inside.instructions.values():
            yield from _dots(program, inner, inside)


def _flops_of_dot(dot: Instruction, computation: Computation) -> float:
    """2 for each element of the result and each element that is summed for it."""
    shape = computation.instructions[dot.operands[0]].outputs[0].shape
    found = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', dot.attributes)
    summed = [shape[int(d)] for d in found[1].split(',') if d] if found else []
    return 2.0 * math.prod(dot.outputs[0].shape) * math.prod(summed)
