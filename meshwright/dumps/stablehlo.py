"""The text of StableHLO, which jax hands to the compiler: arguments, layouts, and exchanges.

Only programs whose devices have parts of arrays by hand, in `shard_map` or `pmap`, have exchanges
before they are compiled. The text has one operation per line; regions begin with a brace at the end
of a line, and end with one at the beginning of a line.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from meshwright.dumps.mesh_sizes import shardy_meshes
from meshwright.dumps.shardings import ShardedArray, describe_argument, read_layout
from meshwright.program.collectives import RING_SHARES, Collective, Groups, MeshAxes, parse_groups
from meshwright.program.hlo_text import DEVICE_MEMORY, ArrayType, numbers_in
from meshwright.user_lines import user_line

_EXCHANGE = re.compile(
    r'stablehlo\.(?:custom_call @)?(all_reduce|all_gather|reduce_scatter|all_to_all|'
    r'ragged_all_to_all|collective_permute|collective_broadcast)\b'
)
_FUNCTION = re.compile(r'func\.func (?:\w+ )*@"?([^\s("]+)')
_CALL = re.compile(r'\bcall @"?([^\s("]+)')
_TENSOR = re.compile(r'tensor<((?:\d+x)*)([\w!.]+)[^>]*>')
_GROUPS = re.compile(
    r'(?:replica_groups|source_target_pairs) = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>'
)
_MESH_AXES = re.compile(r'replica_group_mesh_axes<mesh = @(\S+?), axes = \[(.*?)\]>')
_AXIS = re.compile(r'name = "([^"]*)"(?:[^"]*?pre_size = (\d+), size = (\d+))?')
_CONSTANT = re.compile(r'(%\S+) = (?:stablehlo|sdy)\.constant dense<(-?\d+)> : tensor<u?i\d+>')
_COMPARE = re.compile(r'stablehlo\.compare\s+LT, (%[^\s,]+), (%[^\s,]+)')
_LOCATION = re.compile(r'^#(loc\d*) = loc\((.*)\)$', re.MULTILINE)
_PLACE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+|#(loc\d*)\b')
# Exchanges between stages of Shardy, whose arrays are still whole.
_OF_SHARDY = re.compile(
    r'\bsdy\.(?:all_gather|all_reduce|all_to_all|collective_permute|reduce_scatter)\b'
)
_UNSIGNED = re.compile(r'^ui(\d+)$')
_SIGNED = re.compile(r'^i(\d+)$')


@dataclasses.dataclass
class _Op:
    """An operation: its line, the lines of its regions, and the line that ends the last of them."""

    text: str
    regions: list[list[_Op]] = dataclasses.field(default_factory=list)
    tail: str = ''
    count: int | None = None  # of iterations, if it is a loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableHlo:
    """A program as StableHLO.

    Attributes:
      name: the name of its module.
      num_devices: the number of devices that run it.
      arguments: its arguments.
      collectives: the exchanges that the program itself asks for.
      constraints: the number of its constraints of layouts.
      unknown_loops: the number of loops with exchanges that count once, because the text does not
        tell their length.
      of_shardy: the number of operations of Shardy that exchange data, which are not counted.
      partly_manual: whether exchanges stand where only some mesh axes are manual, so that their
        arrays may still be sharded along the others.
    """

    name: str
    num_devices: int
    arguments: tuple[ShardedArray, ...]
    collectives: tuple[Collective, ...]
    constraints: int
    unknown_loops: int
    of_shardy: int
    partly_manual: bool


def parse_stablehlo(text: str, mesh: MeshAxes | None) -> StableHlo:
    """Reads a program.

    Args:
      text: the text of a module.
      mesh: its mesh, which names the axes.

    Raises:
      ValueError: if the text is cut off, or has no function.
    """
    functions = _parse(text)
    main = functions.get('main') or next(iter(functions.values()), None)
    if main is None:
        raise ValueError('the text has no function: expected func.func public @main')
    head = text.partition('func.func')[0]
    counts = re.findall(r'mhlo\.num_(?:partitions|replicas) = (\d+)', head)
    num_devices = math.prod(map(int, counts))
    meshes = dict(shardy_meshes(text))
    reader = _Reader(functions, dict(_LOCATION.findall(text)), mesh, num_devices, meshes)
    collectives = tuple(reader.exchanges(main.regions[0], 1, ()))
    name = re.search(r'^module @"?([^\s"{]+)', text, re.MULTILINE)
    return StableHlo(
        name=name[1] if name else 'module',
        num_devices=num_devices,
        arguments=tuple(reader.arguments(main.text)),
        collectives=collectives,
        constraints=len(re.findall(r'sdy\.sharding_constraint|custom_call @Sharding\(', text)),
        unknown_loops=reader.unknown_loops,
        of_shardy=len(_OF_SHARDY.findall(text)),
        partly_manual=bool(collectives) and _is_partly_manual(text, mesh),
    )


def _parse(text: str) -> dict[str, _Op]:
    """The functions of a module by name."""
    top: list[_Op] = []
    stack: list[tuple[_Op | None, list[_Op]]] = [(None, top)]
    functions: dict[str, _Op] = {}
    constants: dict[str, int] = {}
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith(('#', '//', '^')):
            continue
        if line.startswith('}'):
            if len(stack) == 1:
                raise ValueError('the text is damaged: a region ends that has not begun')
            owner, _ = stack.pop()
            assert owner is not None
            owner.tail = line
            if line.endswith('{'):  # `} do {` and `}, {`
                stack.append((owner, []))
                owner.regions.append(stack[-1][1])
            continue
        if found := _CONSTANT.match(line):
            constants[found[1]] = int(found[2])
        if (found := _COMPARE.search(line)) and (loop := stack[-1][0]) is not None:
            loop.count = _length(loop.text, found[1], found[2], constants)
        current = stack[-1][1]
        op = current[-1] if line == 'cond {' and current else _Op(line)
        if line != 'cond {':
            current.append(op)
        if line.endswith('{'):
            op.regions.append([])
            stack.append((op, op.regions[-1]))
            if name := _FUNCTION.search(line):
                functions[name[1]] = op
    if len(stack) > 1:
        raise ValueError(f'the text is cut off: {len(stack) - 1} regions have no end')
    return functions


def _length(loop: str, counter: str, limit: str, constants: Mapping[str, int]) -> int | None:
    """The iterations of a loop whose counter is below a limit, in steps of one."""
    first = re.search(rf'{re.escape(counter)} = (%[^\s,)]+)', loop)
    if first is None or first[1] not in constants or limit not in constants:
        return None
    return max(0, constants[limit] - constants[first[1]])


class _Reader:
    """Reads the exchanges and arguments of functions."""

    def __init__(
        self,
        functions: Mapping[str, _Op],
        places: Mapping[str, str],
        mesh: MeshAxes | None,
        num_devices: int,
        meshes: Mapping[str, MeshAxes],
    ):
        self._functions, self._places, self._meshes = functions, places, meshes
        self._mesh, self._num_devices = mesh, num_devices
        self.unknown_loops = 0

    def exchanges(
        self, ops: Sequence[_Op], times: int, callers: tuple[str, ...]
    ) -> Iterator[Collective]:
        """The exchanges of operations that run a number of times, with those that they call."""
        for op in ops:
            if found := _EXCHANGE.search(op.text):
                yield self._describe(op, found[1].replace('_', '-'), times)
                continue
            if (called := _CALL.search(op.text)) and called[1] not in callers:
                function = self._functions.get(called[1])
                inside = function.regions[0] if function else []
                yield from self.exchanges(inside, times, (*callers, called[1]))
            repeats = times
            if 'stablehlo.while' in op.text:
                repeats *= 1 if op.count is None else op.count
            found_inside = [list(self.exchanges(r, repeats, callers)) for r in op.regions]
            if op.count is None and 'stablehlo.while' in op.text and any(found_inside):
                self.unknown_loops += 1
            if re.search(r'stablehlo\.(case|if)\b', op.text):  # the branch that sends the most
                found_inside = [max(found_inside, key=lambda f: sum(c.total_bytes for c in f))]
            for some in found_inside:
                yield from some

    def arguments(self, line: str) -> Iterator[ShardedArray]:
        """The arguments of a function, from its first line."""
        given = line.partition(') -> ')[0]
        parts = re.split(r'%arg(\d+): ', given)[1:]
        for number, part in zip(parts[::2], parts[1::2], strict=True):
            if found := _TENSOR.match(part):
                layout = read_layout(part[found.end() :], self._mesh)
                name = self._name(part) or f'argument {number}'
                yield describe_argument(name, _array(found), layout)

    def _name(self, argument: str) -> str:
        """The name of an argument: `loc("x")`, `loc(#loc1)` or `jax.arg_info = "x"`."""
        if found := re.search(r'jax\.arg_info = "([^"]*)"', argument):
            return found[1]
        found = re.search(r'loc\((?:"([^"]*)"|#(loc\d*))\)', argument)
        if found is None:
            return ''
        return found[1] or self._places.get(found[2], '').strip('"').partition('"')[0]

    def _describe(self, op: _Op, kind: str, times: int) -> Collective:
        text = f'{op.text} {op.tail}'
        groups = self._groups(text)
        size = len(groups[0])
        _, _, signature = text.rpartition(' : (')
        arrays = [_array(found) for found in _TENSOR.finditer(signature.partition(') -> ')[0])]
        if kind == 'ragged-all-to-all':
            arrays = arrays[:1]
        places = [*re.finditer(r'\bloc\((.*?)\)(?= |$)', text)]
        stack = tuple(self._stack(places[-1][1])) if places else ()
        axes = self._mesh.within(groups) if self._mesh else ()
        return Collective(
            kind=kind,
            network='ici',
            axes=axes,
            group_size=size,
            arrays=tuple(map(str, arrays)),
            wire_bytes=RING_SHARES[kind](size) * sum(array.nbytes for array in arrays),
            count=times,
            op_name=self._op_name(places[-1][1]) if places else '',
            source=user_line(stack),
            places=self._mesh.places_of(groups, axes)
            if self._mesh and kind != 'collective-permute'
            else (),
        )

    def _groups(self, text: str) -> Groups:
        """The groups of an exchange: along mesh axes, or as lists of devices."""
        found = _MESH_AXES.search(text)
        if found is None or found[1] not in self._meshes:
            return _read_groups(text, self._num_devices)
        mesh = self._meshes[found[1]]
        sizes = ','.join(f"'{name}'={size}" for name, size in mesh.sizes.items())
        chosen = ','.join(
            f"'{name}':({before}){size}" if size else f"'{name}'"
            for name, before, size in _AXIS.findall(found[2])
        )
        ids = f', device_ids=({",".join(map(str, mesh.order))})' if mesh.order else ''
        return parse_groups(f'replica_groups=mesh[{sizes}]{ids} {{{chosen}}}', self._num_devices)

    def _stack(self, place: str, depth: int = 0) -> Iterator[str]:
        """The 'file:line' of a place, and of its callers."""
        for file, line, other in _PLACE.findall(place) if depth < 100 else ():
            if other:
                yield from self._stack(self._places.get(other, ''), depth + 1)
            else:
                yield f'{file}:{line}'

    def _op_name(self, place: str) -> str:
        """The name of the jax operation at a place."""
        if found := re.match(r'#(loc\d*)$', place):
            place = self._places.get(found[1], '')
        found = re.match(r'"([^"]*)"\(', place)
        return found[1].rstrip(':') if found else ''


def _read_groups(text: str, num_devices: int) -> Groups:
    """Groups such as `dense<[[0, 1], [2, 3]]>`, or `dense<0>` for a single one."""
    if (found := _GROUPS.search(text)) is None:
        return (tuple(range(num_devices)),)
    numbers, width = numbers_in(found[1]), int(found[3])
    return tuple(numbers[i : i + width] for i in range(0, len(numbers), width))


def _array(found: re.Match[str]) -> ArrayType:
    """The type of `tensor<4x2xf32>`, with the names of HLO: 'u8' for 'ui8', 'pred' for 'i1'."""
    shape, dtype = numbers_in(found[1]), found[2]
    if dtype == 'i1':
        dtype = 'pred'
    dtype = _SIGNED.sub(r's\1', _UNSIGNED.sub(r'u\1', dtype)).lower()
    return ArrayType(dtype, shape, shape, DEVICE_MEMORY)


def _is_partly_manual(text: str, mesh: MeshAxes | None) -> bool:
    sizes = mesh.sizes if mesh else {}
    large = {name for name, size in sizes.items() if size > 1}
    manual = re.findall(r'manual_axes=\{([^}]*)\}', text)
    return any(large - {*re.findall(r'"([^"]*)"', axes)} for axes in manual)
