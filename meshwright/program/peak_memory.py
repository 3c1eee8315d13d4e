"""The arrays that are in memory when a program needs the most memory, from its schedule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from meshwright.live_buffers import buffers_at_peak, count_bytes
from meshwright.program.hlo_text import (
    DEVICE_MEMORY,
    ArrayType,
    Computation,
    HloProgram,
    Instruction,
)
from meshwright.program.operations import opcodes_of

# The results of these are (parts of) their operands.
_SAME = ('tuple', 'get-tuple-element', 'bitcast', 'while', 'optimization-barrier')
# These write into their first operand.
_IN_PLACE = ('dynamic-update-slice', 'scatter')
# These run other computations, which this attribute names.
_RUNNING = {'while': 'body', 'call': 'to_apply', 'conditional': 'branch_computations'}
# The results of these are never in the place of an operand.
_OPAQUE = {'convolution', 'dot', 'custom-call', 'call', 'conditional', 'all-gather', 'reduce'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveArray:
    """Equal arrays that are in memory at the peak, such as one array of every layer.

    Attributes:
      array: the type, such as 'bf16[16,2,2048]'.
      nbytes: their size in memory in bytes, all together.
      count: the number of them.
      op_name: the path of the jax operation that makes them, or the first of them.
      source: the 'file:line' of the Python code.
      instruction: the name in the program of the first instruction that makes one.
    """

    array: str
    nbytes: int
    count: int
    op_name: str
    source: str
    instruction: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """What is in the memory of a device at the peak.

    This is an estimate: the text tells when arrays are made and used last, but not which of them
    the compiler puts into the same place.

    Attributes:
      arguments: the size of the program's arguments, in bytes.
      arrays: the other arrays, the largest first. Results in the place of donated arguments are not
        among them.
    """

    arguments: int
    arrays: tuple[LiveArray, ...]

    @property
    def nbytes(self) -> int:
        """The size of the arguments and of the other arrays, in bytes."""
        return self.arguments + sum(array.nbytes for array in self.arrays)


class _Buffer:
    """A place in memory. Given ones exist before and after the computation, and are not counted."""

    def __init__(self, array: ArrayType, maker: Instruction | None):
        self.array, self.maker, self.given = array, maker, maker is None
        self.is_constant = maker is not None and maker.opcode == 'constant'
        self.last = -1

    @property
    def nbytes(self) -> int:
        counted = not self.given and self.array.memory_space == DEVICE_MEMORY
        return self.array.padded_nbytes if counted else 0


_Leaves = list[_Buffer]
_Held = TypeVar('_Held')


def find_peak(program: HloProgram) -> PeakMemory:
    """Estimates which arrays are in memory when a program needs the most.

    Donated arguments keep the results that replace them.
    """
    entry = program.entry
    arguments = [i for i in entry.instructions.values() if i.opcode == 'parameter']
    given = {i.name: [_Buffer(array, None) for array in i.outputs] for i in arguments}
    numbered = {int(i.literal): given[i.name] for i in arguments}
    results: dict[int, _Buffer] = {}
    aliases = re.search(r'input_output_alias=\{(.*?\)) \}', program.header)
    for output, number in re.findall(r'\{(\d*)\}: \((\d+)', aliases[1] if aliases else ''):
        results[int(output or 0)] = numbered[int(number)][0]
    live = _Schedule(program, entry, given, results).peak()
    arrays = [
        LiveArray(
            array=str(buffer.array),
            nbytes=buffer.nbytes,
            count=1,
            op_name=maker.op_name,
            source=program.source_of(maker),
            instruction=maker.name,
        )
        for buffer in live
        if (maker := buffer.maker) is not None
    ]
    in_memory = [a for i in arguments for a in i.outputs if a.memory_space == DEVICE_MEMORY]
    arguments_bytes = sum(array.padded_nbytes for array in in_memory)
    joined = join_equal((array, None) for array in arrays)
    return PeakMemory(arguments=arguments_bytes, arrays=tuple(array for array, _ in joined))


def join_equal(found: Iterable[tuple[LiveArray, _Held]]) -> list[tuple[LiveArray, _Held]]:
    """Joins arrays of one type and line, the largest first, each with what the first one holds.

    The paths of their operations may differ in numbers of layers: 'layers/*/mlp/dot_general'.
    """
    groups: dict[tuple[str, str, str], tuple[LiveArray, _Held]] = {}
    for array, held in found:
        key = array.array, re.sub(r'\d+(?=/)', '*', array.op_name), array.source
        if key in groups:
            one, held = groups[key]
            nbytes, count = one.nbytes + array.nbytes, one.count + array.count
            array = dataclasses.replace(one, nbytes=nbytes, count=count)
        groups[key] = array, held
    return sorted(groups.values(), key=lambda pair: -pair[0].nbytes)


class _Schedule:
    """When the buffers of one computation are first and last used.

    Args:
      program: the program.
      computation: the computation.
      given: the buffers of its parameters, by their names.
      results: buffers that its results must be in, by their number.
    """

    def __init__(
        self,
        program: HloProgram,
        computation: Computation,
        given: Mapping[str, _Leaves],
        results: Mapping[int, _Buffer],
    ):
        self._program, self._instructions = program, list(computation.instructions.values())
        self._leaves: dict[str, _Leaves] = dict(given)
        self._made: list[list[_Buffer]] = []
        for time, instruction in enumerate(self._instructions):
            self._made.append(self._place(instruction))
            # What takes one element of a tuple does not use the others.
            takes_one = instruction.opcode == 'get-tuple-element'
            for name in (*(() if takes_one else instruction.operands), instruction.name):
                for buffer in self._leaves[name]:
                    buffer.last = time
        root = self._leaves[computation.root.name]
        for number, buffer in enumerate(root):
            buffer.last = len(self._instructions)
            if number in results and buffer.array.shape == results[number].array.shape:
                buffer.given = True
        for time in range(len(self._instructions)):
            self._reuse(time)

    def peak(self) -> list[_Buffer]:
        """The buffers at the peak, also the ones in the loop or call that runs then."""
        instructions = enumerate(self._instructions)
        inside = {time: self._inner_peak(i) for time, i in instructions if i.opcode in _RUNNING}
        return buffers_at_peak(self._made, inside)

    def _place(self, instruction: Instruction) -> list[_Buffer]:
        """Decides the buffers of the results, and returns those that are new."""
        if instruction.name in self._leaves:  # a parameter
            return []
        operands = [self._leaves[name] for name in instruction.operands]
        buffers: _Leaves = []
        new: list[_Buffer] = []
        shared = _shared(instruction, operands)
        for array, same in zip(instruction.outputs, shared, strict=True):
            buffers.append(_Buffer(array, instruction) if same is None else same)
            if same is None:
                new.append(buffers[-1])
        self._leaves[instruction.name] = buffers
        return new if instruction.opcode != 'constant' else []

    def _reuse(self, time: int) -> None:
        """Ends operands before an instruction whose results can be in their place."""
        instruction = self._instructions[time]
        operands = [b for name in instruction.operands for b in self._leaves[name]]
        for buffer in self._made[time]:
            if buffer.given:
                continue
            number = next(i for i, b in enumerate(self._leaves[instruction.name]) if b is buffer)
            for operand in _reusable(self._program, instruction, operands, number):
                same = operand.array.padded_nbytes == buffer.array.padded_nbytes
                kept = operand.last != time or operand.given or operand.is_constant
                if same and not kept:
                    operand.last = time - 1
                    break

    def _inner_peak(self, instruction: Instruction) -> list[_Buffer]:
        """The buffers at the peak of the loop or call that an instruction runs."""
        peaks = []
        for name in instruction.called(_RUNNING[instruction.opcode]):
            inside = self._program.computations[name]
            parameters = [i for i in inside.instructions.values() if i.opcode == 'parameter']
            given = {i.name: [_Buffer(array, None) for array in i.outputs] for i in parameters}
            results = dict(enumerate(_Buffer(array, None) for array in instruction.outputs))
            peaks.append(_Schedule(self._program, inside, given, results).peak())
        return max(peaks, key=count_bytes, default=[])


def _shared(instruction: Instruction, operands: Sequence[_Leaves]) -> list[_Buffer | None]:
    """The buffers of operands that the results of an instruction are in, or None for new ones."""
    outputs, opcode = instruction.outputs, instruction.opcode
    flat = [buffer for leaves in operands for buffer in leaves]
    if opcode == 'get-tuple-element':
        found = re.search(r'index=(\d+)', instruction.attributes)
        flat = flat[int(found[1]) :] if found and len(outputs) == 1 else flat
        return _of_equal_type(outputs, flat)
    if opcode in _SAME and len(flat) == len(outputs):
        return list(flat)
    if opcode.endswith(('-done', '-update')):
        first = opcode.startswith(('copy', 'slice'))  # (result, operand, ...), others the reverse
        return _of_equal_type(outputs, flat if first else flat[::-1])
    if opcode.endswith('-start') or 'ConcatBitcast' in instruction.attributes:
        return _of_equal_type(outputs, flat)
    shared: list[_Buffer | None] = [None] * len(outputs)
    if opcode in _IN_PLACE:
        shared[0] = flat[0]
    _, _, aliasing = instruction.attributes.partition('output_to_operand_aliasing={')
    for output, number in re.findall(r'\{(\d*)\}: \((\d+), \{\}\)', aliasing):
        shared[int(output or 0)] = operands[int(number)][0]
    return shared


def _of_equal_type(
    outputs: Sequence[ArrayType], buffers: Sequence[_Buffer]
) -> list[_Buffer | None]:
    """For each output, the first buffer of its type that no other output has, or None."""
    left = list(buffers)
    found: list[_Buffer | None] = []
    for array in outputs:
        at = next((i for i, buffer in enumerate(left) if buffer.array == array), None)
        found.append(None if at is None else left.pop(at))
    return found


def _reusable(
    program: HloProgram, instruction: Instruction, operands: Sequence[_Buffer], output: int
) -> Iterator[_Buffer]:
    """The operands in whose place a result may be: TPU programs list them by number."""
    if '"aliasing_operands"' in instruction.attributes:
        for indices in re.findall(r'"indices":\[([^\]]*)\]', instruction.attributes):
            numbers = [int(n) for n in re.findall(r'\d+', indices)]
            if len(operands) + output in numbers:
                yield from (operands[n] for n in numbers if n < len(operands))
    elif not _OPAQUE & set(opcodes_of(program, instruction)):
        yield from operands
