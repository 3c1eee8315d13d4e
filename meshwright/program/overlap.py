"""What a program computes while an exchange runs, from the order in which it was scheduled.

Compilers cut a product of sharded arrays into parts, and send what the next part needs while they
compute this one:

    start = collective-permute-start(part)      # its neighbour gets it meanwhile
    fusion(..., convolution)                    # a product of another part
    collective-permute-done(start)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from meshwright.program.hlo_text import Computation, HloProgram, Instruction

_PRODUCTS = ('convolution', 'dot')
_PERMUTE = 'collective-permute-start'


def products_meanwhile(program: HloProgram, start: Instruction, inside: Computation) -> float:
    """The FLOPs of the products between the start of an exchange and its end, on one device.

    Args:
      program: the program, whose instructions are in the order in which they run.
      start: the instruction that starts the exchange.
      inside: the computation that it is part of.
    """
    found, running = 0.0, False
    for instruction in inside.instructions.values():
        if instruction is start:
            running = True
        elif running and start.name in instruction.operands:
            return found  # its end, or if it is another reader, the end of what is known
        elif running:
            found += sum(_products_in(program, instruction, inside))
    return 0.0


def _products_in(
    program: HloProgram, instruction: Instruction, inside: Computation
) -> Iterator[float]:
    """The FLOPs of the products that an instruction is, or has in its fusion.

    The sizes of a product are (m, k), (k, n) and (m, n), however its dimensions are arranged: its
    FLOPs follow from the number of elements of all three.
    """
    if instruction.opcode in _PRODUCTS:
        sizes = [math.prod(inside.instructions[n].outputs[0].shape) for n in instruction.operands]
        yield 2 * math.sqrt(math.prod(sizes) * math.prod(instruction.outputs[0].shape))
    for name in instruction.called('calls') if instruction.opcode == 'fusion' else ():
        computation = program.computations[name]
        for inner in computation.instructions.values():
            yield from _products_in(program, inner, computation)


def pair_opposites(inside: Computation) -> dict[str, str]:
    """Finds the permutes of a computation that run at once in opposite directions, by their names.

    Compilers send parts of an array both ways around a ring, over different links:

        there = collective-permute-start(a), source_target_pairs={{0,1},{1,2},{2,0}}
        back = collective-permute-start(b), source_target_pairs={{1,0},{2,1},{0,2}}

    They are a pair if one starts before the other has ended. None is in two pairs.
    """
    running: dict[str, frozenset[tuple[str, str]]] = {}
    pairs: dict[str, str] = {}
    for instruction in inside.instructions.values():
        for name in instruction.operands:
            running.pop(name, None)  # its end
        if instruction.opcode != _PERMUTE:
            continue
        _, _, listed = instruction.attributes.partition('source_target_pairs={')
        route = frozenset(re.findall(r'\{(\d+),(\d+)\}', listed.partition('}}')[0] + '}'))
        back = frozenset((target, source) for source, target in route)
        free = [name for name, one in running.items() if name not in pairs and one == back != route]
        if free:
            pairs |= {instruction.name: free[0], free[0]: instruction.name}
        running[instruction.name] = route
    return pairs
