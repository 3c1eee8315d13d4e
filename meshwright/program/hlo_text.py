"""The text of a compiled program (HLO), parsed into computations and instructions.

JAX offers no structured view of an optimized program, so its text is read. The text has one
instruction per line, except that the metadata of kernels can span several lines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# XLA's types whose size in bits is not the number in their name.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
# Memory spaces of XLA's layouts: 0 is the device's main memory; on TPUs 5 is the host's.
DEVICE_MEMORY, HOST_MEMORY = 0, 5

_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = ')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$')
# Computations of other cores than the main one, such as SparseCores, say so at their end.
_END = re.compile(r'^\}(, execution_thread=.*)?$')
_ARRAY = re.compile(r'(\w+)\[([\d,<= ]*)\](\{[^{}]*\})?')
_ORDER = re.compile(r'\{([\d,]*)')
_TILE = re.compile(r'T\(([\d,]+)\)')
_SPACE = re.compile(r'S\((\d+)\)')
_BRACKETS = re.compile(r'[()]')
_SEPARATORS = re.compile(r'[(\[{}\]),]')
_TYPE = re.compile(r'\w+\[[^\]]*\](?:\{[^}]*\})?')


class ArrayType(NamedTuple):
    """The type of one array.

    Attributes:
      dtype: the type of its elements, as XLA writes it.
      shape: its shape.
      padded_shape: the sizes in memory, where TPUs pad the last dimensions to whole tiles.
      memory_space: XLA's number of the memory that it is in.
    """

    dtype: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    memory_space: int

    @property
    def nbytes(self) -> int:
        """The size in bytes without padding."""
        return math.prod(self.shape) * bits_of(self.dtype) // 8

    @property
    def padded_nbytes(self) -> int:
        """The size in memory, in bytes."""
        return math.prod(self.padded_shape) * bits_of(self.dtype) // 8

    def __str__(self) -> str:
        return f'{self.dtype}[{",".join(map(str, self.shape))}]'


class Instruction(NamedTuple):
    """One instruction of a computation.

    Attributes:
      name: its name, unique in the program.
      opcode: for example 'fusion' or 'all-gather-start'.
      outputs: the arrays of its result; arrays in nested tuples follow one another.
      operands: the names of the instructions whose results it takes.
      literal: the value of a constant or the number of a parameter, and '' for others.
      attributes: everything after the operands, as text.
      is_root: whether its result is the result of the computation.
      elements: the arrays of each element of its result, if that is a tuple.
    """

    name: str
    opcode: str
    outputs: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool
    elements: tuple[tuple[ArrayType, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the result in bytes."""
        return sum(array.nbytes for array in self.outputs)

    def called(self, attribute: str) -> tuple[str, ...]:
        """The names of the computations in an attribute such as 'calls', 'body' or 'to_apply'."""
        found = re.search(rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.attributes)
        return tuple(re.findall(r'[\w.\-]+', found[1])) if found else ()

    @property
    def op_name(self) -> str:
        """The path of the jax operation that it comes from, or ''."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """The instructions of a computation by name, in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        return next(i for i in self.instructions.values() if i.is_root)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloProgram:
    """A compiled program.

    Attributes:
      entry: the computation that runs.
      computations: all computations by name.
      num_devices: the number of devices that run it: its partitions times its replicas.
      header: the first line, with the aliases of arguments and outputs.
      sources: the 'file:line' of each stack frame, by its number.
      callers: the number of the frame that called each stack frame, 0 for the outermost.
    """

    entry: Computation
    computations: Mapping[str, Computation]
    num_devices: int
    header: str
    sources: Mapping[int, str]
    callers: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def source_of(self, instruction: Instruction) -> str:
        """The 'file:line' of the Python code that an instruction comes from, or ''."""
        attributes = instruction.attributes
        if frame := re.search(r'stack_frame_id=(\d+)', attributes):
            return self.sources.get(int(frame[1]), '')
        found = re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes)
        return f'{found[1]}:{found[2]}' if found else ''

    def stack_of(self, instruction: Instruction) -> tuple[str, ...]:
        """The 'file:line' of the code that an instruction comes from, and of all its callers."""
        frame = re.search(r'stack_frame_id=(\d+)', instruction.attributes)
        if frame is None:
            source = self.source_of(instruction)
            return (source,) if source else ()
        stack: list[str] = []
        number = int(frame[1])
        while number in self.sources and len(stack) < len(self.sources):
            stack.append(self.sources[number])
            number = self.callers.get(number, 0)
        return tuple(stack)


@functools.lru_cache(maxsize=1)
def parse_hlo(text: str) -> HloProgram:
    """Parses `compiled.as_text()`. The last program is kept, because several questions need it.

    Raises:
      ValueError: if the text is not a program, or if it is cut off.
    """
    header = text.partition('\n')[0]
    computations: dict[str, Computation] = {}
    entry, name, instructions = '', '', dict[str, Instruction]()
    for line in _logical_lines(text):
        if start := _COMPUTATION.match(line):
            name, instructions = start[2], {}
            entry = name if start[1] else entry
        elif _END.match(line):
            computations[name] = Computation(name=name, instructions=instructions)
            name = ''
        elif _INSTRUCTION.match(line):
            try:
                instruction = _parse_instruction(line)
                if '#' in line:
                    instructions |= _parts_of_tuples(instruction, instructions)
            except (IndexError, KeyError, ValueError) as error:
                raise ValueError(f'the text is cut off in {line.strip()[:60]!r}') from error
            instructions[instruction.name] = instruction
    if name:
        raise ValueError(f'the text is cut off: the computation {name!r} has no end')
    if entry not in computations:
        raise ValueError(
            f'not the text of a compiled program: no ENTRY computation after {header[:60]!r}; '
            'give compiled.as_text()'
        )
    counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', header)
    sources, callers = _parse_sources(text)
    return HloProgram(
        entry=computations[entry],
        computations=computations,
        num_devices=math.prod(map(int, counts)),
        header=header,
        sources=sources,
        callers=callers,
    )


def _logical_lines(text: str) -> Iterator[str]:
    """The lines of all computations, where the lines of one instruction are joined."""
    pending = ''
    for line in text.splitlines():
        starts = _INSTRUCTION.match(line) or _END.match(line) or _COMPUTATION.match(line)
        if starts or not line:
            if pending:
                yield pending
            pending = line
        elif pending:
            pending += line
    if pending:
        yield pending


def _parse_instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    assert start is not None
    position = start.end()
    end = _closing(line, position) if line[position] == '(' else line.index(' ', position)
    elements = tuple(map(tuple, map(_parse_arrays, _split(line[position:end]))))
    outputs = tuple(itertools.chain.from_iterable(elements))
    opening = line.index('(', end)
    closing = _closing(line, opening)
    opcode, arguments = line[end:opening].strip(), line[opening + 1 : closing - 1]
    literal = arguments if opcode in ('constant', 'parameter') else ''
    operands = () if literal else _operand_names(arguments)
    attributes, is_root = line[closing:], bool(start[1])
    return Instruction(start[2], opcode, outputs, operands, literal, attributes, is_root, elements)


def _split(kind: str) -> Iterator[str]:
    """The types of the elements of a tuple, or the type of anything else."""
    if not kind.startswith('('):
        yield kind
        return
    begin, depth = 1, 0
    for mark in _SEPARATORS.finditer(kind):
        depth += {',': 0}.get(mark[0], 1 if mark[0] in '([{' else -1)
        if (mark[0] == ',' and depth == 1) or not depth:
            yield kind[begin : mark.start()]
            begin = mark.end()


def _parts_of_tuples(
    instruction: Instruction, known: Mapping[str, Instruction]
) -> dict[str, Instruction]:
    """The instructions that `get-tuple-element` would be in a text that writes `%loop#3` for them.

    Dumps of compilers do, and `as_text()` does not.
    """
    parts = {}
    for name in instruction.operands:
        whole, mark, number = name.partition('#')
        if not mark or name in known:
            continue
        arrays = known[whole].elements[int(number)]
        parts[name] = Instruction(
            name, 'get-tuple-element', arrays, (whole,), '', f', index={number}', False, (arrays,)
        )
    return parts


def _closing(line: str, opening: int) -> int:
    """The position behind the bracket that closes the one at `opening`."""
    depth = 0
    for bracket in _BRACKETS.finditer(line, opening):
        depth += 1 if bracket[0] == '(' else -1
        if not depth:
            return bracket.end()
    raise ValueError('a bracket is never closed')


def _parse_arrays(text: str) -> Iterator[ArrayType]:
    for dtype, dimensions, layout in _ARRAY.findall(text):
        shape = numbers_in(dimensions)
        space = _SPACE.search(layout)
        padded = _pad(shape, layout)
        yield ArrayType(dtype, shape, padded, int(space[1]) if space else DEVICE_MEMORY)


def _pad(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Rounds the sizes of a shape up to whole tiles: `{1,0:T(8,128)}` has tiles of 8 x 128."""
    order, tile = _ORDER.match(layout), _TILE.search(layout)
    if order is None or tile is None:
        return shape
    sizes = list(shape)
    dimensions, tiles = numbers_in(order[1]), reversed(numbers_in(tile[1]))
    for dimension, length in zip(dimensions, tiles, strict=False):  # the fastest one first
        sizes[dimension] = -(-sizes[dimension] // length) * length
    return tuple(sizes)


def numbers_in(text: str) -> tuple[int, ...]:
    """The whole numbers in a text: `2,4` or `{2,4}` has 2 and 4."""
    return tuple(int(n) for n in re.findall(r'\d+', text))


def bits_of(dtype: str) -> int:
    digits = re.search(r'\d+', dtype)
    return _BITS[dtype] if dtype in _BITS else int(digits[0]) if digits else 8


def _operand_names(text: str) -> tuple[str, ...]:
    """The names in a list of operands, which may have types before them."""
    if '%' in text:
        return tuple(re.findall(r'%([\w.\-]+(?:#\d+)?)', text))
    without_types = _BRACKETS.sub('', _TYPE.sub('', re.sub(r'/\*.*?\*/', '', text)))
    return tuple(word.split()[-1] for word in without_types.split(',') if word.strip())


def _parse_sources(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """The 'file:line' and the caller of each stack frame, from the tables at the start."""
    head = text[: text.find('\n%')]
    tables: dict[str, dict[int, str]] = {}
    for title, body in re.findall(r'^(File\w+|StackFrames)\n((?:\d+ .*\n)*)', head, re.MULTILINE):
        rows = (row.partition(' ') for row in body.splitlines())
        tables[title] = {int(number): content for number, _, content in rows}
    files = {number: name.strip('"') for number, name in tables.get('FileNames', {}).items()}

    def field(row: str, name: str) -> int:
        found = re.search(rf'\b{name}=(\d+)', row)
        return int(found[1]) if found else 0

    places = {
        number: f'{files.get(field(row, "file_name_id"), "")}:{field(row, "line")}'
        for number, row in tables.get('FileLocations', {}).items()
    }
    frames = tables.get('StackFrames', {})
    parents = {number: field(row, 'parent_frame_id') for number, row in frames.items()}
    # XLA writes the number of the parent plus one: the outermost frame 1 has the parent 1.
    shift = 1 if parents.get(1) == 1 else 0
    sources = {n: places.get(field(row, 'file_location_id'), '') for n, row in frames.items()}
    return sources, {number: parent - shift for number, parent in parents.items()}
