"""The computation of a program: the compiler's estimate of the cycles of its operations."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from meshwright.program.hlo_text import HloProgram, Instruction
from meshwright.program.visits import Visit, cycles_of

# What an operation is called, by the first of these opcodes that it contains.
_KINDS = {
    'convolution': 'matmul',
    'dot': 'matmul',
    'custom-call': 'kernel',
    'scatter': 'scatter',
    'gather': 'gather',
    'sort': 'sort',
    'reduce-window': 'reduce',
    'reduce': 'reduce',
    'dynamic-update-slice': 'update',
    'transpose': 'copy',
    'copy': 'copy',
}
_OF_GROUPS = '/ragged_dot_general'  # the end of the names of products of groups of rows
# Custom calls that hold no computation of their own.
_NOT_KERNELS = ('AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast', 'AsyncCollective')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """Operations of one kind from one line of Python code.

    Attributes:
      kind: 'matmul', 'elementwise', 'reduce', 'update', 'copy', 'gather', 'scatter', 'sort', ...
      source: the 'file:line' of the Python code.
      op_name: the path of the jax operation of the one with the most cycles.
      cycles: the compiler's estimate of their cycles in one call of the program.
      count: the number of executions in one call of the program.
    """

    kind: str
    source: str
    op_name: str
    cycles: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A hand-written kernel, such as one of Pallas, whose cycles the compiler does not estimate.

    Attributes:
      name: the name of the kernel.
      source: the 'file:line' of the Python code.
      count: the number of executions in one call of the program.
    """

    name: str
    source: str
    count: int


def find_operations(program: HloProgram, visits: list[Visit]) -> tuple[Operation, ...]:
    """Returns the operations with estimated cycles, those with the most first.

    Collectives, copies between memories, and kernels have no estimate. That of products of groups
    of rows is left out: it is hundreds of times what they compute, since the compiler does not know
    how often their loops run.

    Args:
      program: the program.
      visits: what it runs, from `visit_program`.
    """
    groups: dict[tuple[str, str], list[tuple[int, Visit]]] = collections.defaultdict(list)
    for visit in visits:
        if visit.instruction.op_name.endswith(_OF_GROUPS):
            continue
        if cycles := cycles_of(visit.instruction):
            key = _kind_of(program, visit.instruction), program.source_of(visit.instruction)
            groups[key].append((cycles * visit.times, visit))
    operations = [
        Operation(
            kind=kind,
            source=source,
            op_name=max(members, key=lambda m: m[0])[1].instruction.op_name,
            cycles=sum(cycles for cycles, _ in members),
            count=sum(visit.times for _, visit in members),
        )
        for (kind, source), members in groups.items()
    ]
    return tuple(sorted(operations, key=lambda o: -o.cycles))


def find_kernels(program: HloProgram, visits: list[Visit]) -> tuple[Kernel, ...]:
    """Returns the kernels of a program, which `find_operations` leaves out."""
    counts: dict[tuple[str, str], int] = collections.defaultdict(int)
    for instruction, _, times in visits:
        if instruction.opcode == 'custom-call' and cycles_of(instruction) is None:
            target = _target(instruction)
            if not target.startswith(_NOT_KERNELS):
                path = instruction.op_name.removesuffix('/pallas_call')
                name = path.rpartition('/')[2] if target == 'tpu_custom_call' else target
                counts[name, program.source_of(instruction)] += times
    return tuple(Kernel(name=n, source=s, count=c) for (n, s), c in counts.items())


def _kind_of(program: HloProgram, instruction: Instruction) -> str:
    opcodes = set(opcodes_of(program, instruction))
    return next((kind for opcode, kind in _KINDS.items() if opcode in opcodes), 'elementwise')


def opcodes_of(program: HloProgram, instruction: Instruction) -> Iterator[str]:
    """The opcode of an instruction, or those inside of a fusion."""
    if instruction.opcode == 'fusion':
        for name in instruction.called('calls'):
            for inner in program.computations[name].instructions.values():
                yield from opcodes_of(program, inner)
    elif instruction.opcode != 'custom-call' or not _target(instruction).startswith(_NOT_KERNELS):
        yield instruction.opcode


def _target(instruction: Instruction) -> str:
    _, _, rest = instruction.attributes.partition('custom_call_target="')
    return rest.partition('"')[0]
