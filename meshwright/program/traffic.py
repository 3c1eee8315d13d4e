"""The bytes that a program reads and writes in the memory of a device and of its host."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.program.collectives import is_exchange
from meshwright.program.hlo_text import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    Computation,
    HloProgram,
    Instruction,
)
from meshwright.program.operations import opcodes_of
from meshwright.program.visits import Visit

# Instructions that move nothing, or whose parts are counted where they run.
_NO_TRAFFIC = {
    'after-all',
    'bitcast',
    'call',
    'conditional',
    'constant',
    'custom-call',
    'get-tuple-element',
    'iota',
    'opt-barrier',
    'parameter',
    'partition-id',
    'replica-id',
    'recv',
    'send',
    'tuple',
    'while',
}
_PRODUCTS = {'convolution', 'dot'}
_PARTIAL_READS = ('dynamic-slice', 'gather', 'slice')


def find_traffic(program: HloProgram, visits: list[Visit]) -> tuple[float, float]:
    """Adds up what the operations of a program move in the device, and to and from the host.

    An operation reads and writes each of its arrays once, and of those that it cuts a slice from,
    or changes in a slice, only the slice.

    Args:
      program: the program.
      visits: what it runs, from `visit_program`.

    Returns:
      The bytes that operations other than matrix products, kernels and exchanges read and write in
      the memory of the device, and the bytes that are copied between its memory and the host's.
    """
    device = host = 0.0
    for instruction, computation, times in visits:
        opcode = instruction.opcode
        if opcode in _NO_TRAFFIC or opcode.endswith(('-done', '-update')):
            continue
        if opcode == 'async-start' and instruction.called('calls'):
            continue  # what it calls is visited
        if copied := _copied_to_or_from_host(instruction, computation):
            host += copied * times
        elif not opcode.endswith('-start') and not _is_counted_elsewhere(program, instruction):
            device += sum(_moved(program, instruction, computation)) * times
    return device, host


def _is_counted_elsewhere(program: HloProgram, instruction: Instruction) -> bool:
    inside = set(opcodes_of(program, instruction))
    return bool(_PRODUCTS & inside) or any(map(is_exchange, inside)) or 'custom-call' in inside


def _copied_to_or_from_host(instruction: Instruction, computation: Computation) -> float:
    """The bytes of a copy between the memories of the device and of the host, or 0."""
    operands = [a for n in instruction.operands for a in computation.instructions[n].outputs]
    results = list(instruction.outputs)
    if instruction.opcode.endswith('-start'):  # the result has the operands in it
        operands = operands or results
    spaces = [array.memory_space for array in (*operands, *results)]
    if HOST_MEMORY not in spaces or all(space == HOST_MEMORY for space in spaces):
        return 0.0
    name = instruction.opcode.removesuffix('-start')
    if name == 'dynamic-update-slice':
        return operands[1].nbytes
    if name == 'dynamic-slice':
        arrays = (*results, *operands)
        whole = next(array.shape for array in arrays if array.memory_space == HOST_MEMORY)
        slices = [array.nbytes for array in arrays if len(array.shape) == len(whole)]
        return min(slices)
    return max(array.nbytes for array in operands)


def _moved(
    program: HloProgram, instruction: Instruction, computation: Computation
) -> Iterator[float]:
    """The bytes that an operation reads and writes in the memory of the device."""
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode == 'fusion':
        inside = program.computations[instruction.called('calls')[0]]
        yield from _moved_in_fusion(inside, instruction)
        return
    if instruction.opcode == 'dynamic-update-slice':
        yield 2.0 * operands[1].nbytes
        return
    yield sum(a.nbytes for a in instruction.outputs if a.memory_space == DEVICE_MEMORY)
    if instruction.opcode in _PARTIAL_READS:
        yield instruction.nbytes
        return
    for operand in operands:
        yield sum(a.nbytes for a in operand.outputs if a.memory_space == DEVICE_MEMORY)


def _moved_in_fusion(inside: Computation, fusion: Instruction) -> Iterator[float]:
    users: dict[str, list[Instruction]] = {}
    for instruction in inside.instructions.values():
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    changed = {
        i.operands[0] for i in inside.instructions.values() if i.opcode == 'dynamic-update-slice'
    }
    for instruction in inside.instructions.values():
        if instruction.opcode == 'dynamic-update-slice':
            yield inside.instructions[instruction.operands[1]].nbytes
        if instruction.opcode != 'parameter' or instruction.name in changed:
            continue
        name, readers = instruction.name, users.get(instruction.name, [])
        if readers and all(r.opcode in _PARTIAL_READS and r.operands[0] == name for r in readers):
            yield sum(reader.nbytes for reader in readers)
        else:
            yield sum(a.nbytes for a in instruction.outputs if a.memory_space == DEVICE_MEMORY)
    if not changed:
        yield sum(a.nbytes for a in fusion.outputs if a.memory_space == DEVICE_MEMORY)
