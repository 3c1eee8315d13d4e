"""The exchanges of data between the devices of a program, and the bytes that they move."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from meshwright.program.hlo_text import Computation, HloProgram, Instruction, numbers_in
from meshwright.program.overlap import pair_opposites, products_meanwhile
from meshwright.program.visits import Visit

# The bytes that a device sends in a ring of n devices, as a multiple of its operand: the share of
# the whole array that gathers and scatters move is (n - 1) / n.
RING_SHARES: dict[str, Callable[[int], float]] = {
    'all-gather': lambda n: n - 1,  # the operand is a shard
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,  # a reduce-scatter and an all-gather
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
    'collective-broadcast': lambda n: 1,
}
# On TPUs, a reduce-scatter is a fusion of this name, of an all-reduce and what keeps a shard of it.
_REDUCE_SCATTER = 'all-reduce-scatter'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation of a program.

    Attributes:
      kind: 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute', ...
      network: 'ici' for links within a slice or host, 'dcn' for those between slices.
      axes: the mesh axes along which it exchanges data; empty if the mesh is not known.
      group_size: the number of devices, or over 'dcn' of slices, that exchange data.
      arrays: the types of the arrays that each device gives, such as 'bf16[128,64]'.
      wire_bytes: the bytes that each device sends in one execution, with rings.
      count: the number of executions in one call of the program.
      op_name: the path of the jax operation.
      source: the 'file:line' of the Python code.
      asynchronous: whether the program computes while it runs; None if nothing was compiled.
      instruction: its name in the program.
      places: where the devices of its first group are along `axes`, as numbers of the devices there
        in the order of the mesh; empty if the group has all of them.
      flops_meanwhile: the FLOPs of the products that the program is known to compute while one
        execution runs: of asynchronous 'collective-permute's, into which compilers cut exchanges.
      opposite_bytes: the bytes that another 'collective-permute' sends at the same time in the
        opposite direction, over other links.
    """

    kind: str
    network: str
    axes: tuple[str, ...]
    group_size: int
    arrays: tuple[str, ...]
    wire_bytes: float
    count: int
    op_name: str
    source: str
    asynchronous: bool | None = False
    instruction: str = ''
    places: tuple[int, ...] = ()
    flops_meanwhile: float = 0.0
    opposite_bytes: float = 0.0

    @property
    def share_of_pair(self) -> float:
        """Its share of the bytes of two exchanges in opposite directions; 1 if it runs alone."""
        return self.wire_bytes / (self.wire_bytes + self.opposite_bytes) if self.wire_bytes else 1.0

    @property
    def total_bytes(self) -> float:
        """The bytes that each device sends in one call of the program."""
        return self.wire_bytes * self.count

    @property
    def result_bytes(self) -> float:
        """The bytes of the arrays that it returns in one call, as the text of the program has them.

        In a ring, a device sends nearly twice what an all-reduce returns, and somewhat less than
        what a gather returns.
        """
        n = self.group_size
        if n < 2:
            return 0.0
        operands = self.total_bytes / RING_SHARES[self.kind](n)
        if self.kind == 'all-gather':
            return operands * n
        # On TPUs, a reduce-scatter is an all-reduce in a fusion, which keeps a part of it.
        is_scatter = self.kind == 'reduce-scatter' and not self.instruction.startswith('all-reduce')
        return operands / n if is_scatter else operands


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """The axes of a mesh, for collectives.

    Attributes:
      sizes: the size of each axis, in the order of the mesh.
      slices: the number of slices along axes that span several.
      order: the number of the device at each place of the mesh; empty if they ascend.
    """

    sizes: Mapping[str, int]
    slices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    order: tuple[int, ...] = ()

    def within(self, groups: Groups) -> tuple[str, ...]:
        """The axes that groups of devices span.

        Programs for several slices number the devices of one slice.
        """
        groups, sizes = self._in_order(groups)
        listed = 1 + max(max(group) for group in groups)
        return axes_of_groups(groups, sizes) if listed <= math.prod(sizes.values()) else ()

    def places_of(self, groups: Groups, axes: Sequence[str]) -> tuple[int, ...]:
        """Where the devices of the first group are along the axes that all groups span.

        Slices come first along an axis that spans several, so places in a slice are also places in
        the whole mesh.

        Returns:
          Their numbers among the devices along the axes, or () if the group has all of these.
        """
        groups, sizes = self._in_order(groups)
        if not axes or len(groups[0]) == math.prod(sizes[name] for name in axes):
            return ()
        places = dict(zip(sizes, np.unravel_index(groups[0], tuple(sizes.values())), strict=True))
        along = np.ravel_multi_index(
            tuple(places[name] for name in axes), tuple(self.sizes[name] for name in axes)
        )
        return tuple(int(n) for n in along)

    def _in_order(self, groups: Groups) -> tuple[Groups, dict[str, int]]:
        """Groups with numbers in the order of the mesh, and the sizes of the axes there."""
        sizes = dict(self.sizes)
        if self.order:
            places = {device: place for place, device in enumerate(self.order)}
            groups = tuple(tuple(places.get(n, n) for n in group) for group in groups)
        if 1 + max(max(group) for group in groups) < math.prod(sizes.values()):
            sizes = {name: size // self.slices.get(name, 1) for name, size in sizes.items()}
        return groups, sizes


def find_collectives(
    program: HloProgram, visits: list[Visit], mesh: MeshAxes | None = None
) -> tuple[Collective, ...]:
    """Finds the collectives of a program, in the order in which they run.

    Args:
      program: the program.
      visits: what it runs, from `visit_program`.
      mesh: the mesh that it was compiled for, which names the axes.
    """
    found, chains, places = [], set[tuple[str, str, str]](), dict[str, Computation]()
    started = set[str]()
    for visit in visits:
        if visit.instruction.opcode in ('async-start', 'call-start'):
            started |= {
                name for by in ('calls', 'to_apply') for name in visit.instruction.called(by)
            }
        elif visit.computation.name in started:
            started |= {*visit.instruction.called('called_computations')}
    for visit in visits:
        for instruction, inside in _exchanging(program, visit.instruction, visit.computation):
            # An asynchronous collective appears in all fusions that it overlaps with.
            chain = _chain(instruction) if inside is not visit.computation else ''
            key = (visit.computation.name, instruction.opcode, chain)
            if not chain or key not in chains:
                chains.add(key)
                overlaps = bool(chain) or visit.computation.name in started
                found.append(_describe(program, instruction, inside, visit, mesh, overlaps))
                if instruction.opcode.startswith('collective-permute'):
                    places[inside.name] = inside
    return tuple(_join_opposites(found, places.values()))


def _join_opposites(
    found: Sequence[Collective], places: Iterable[Computation]
) -> Iterator[Collective]:
    """Yields collectives; those with an opposite one know its bytes."""
    pairs = {name: other for place in places for name, other in pair_opposites(place).items()}
    sizes = {one.instruction: one.wire_bytes for one in found if one.instruction in pairs}
    for one in found:
        opposite = sizes.get(pairs.get(one.instruction, ''), 0.0)
        yield dataclasses.replace(one, opposite_bytes=opposite) if opposite else one


def _exchanging(
    program: HloProgram, instruction: Instruction, computation: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    """The collective that an instruction is, or those inside of a fusion, and where they stand."""
    if instruction.opcode == 'fusion':
        for name in instruction.called('calls'):
            inside = program.computations[name]
            for inner in inside.instructions.values():
                yield from _exchanging(program, inner, inside)
    elif is_exchange(instruction.opcode) or (
        instruction.opcode == 'send' and '_xla_megascale_target' in instruction.attributes
    ):
        yield instruction, computation


def is_exchange(opcode: str) -> bool:
    """Whether instructions with this opcode exchange data with other devices."""
    return opcode.removesuffix('-start') in RING_SHARES


def _chain(instruction: Instruction) -> str:
    """What the parts of an asynchronous collective in several fusions have in common.

    All collectives of a shard_map have the same channel, so the channel alone does not tell.
    """
    if found := re.search(r'chain_id="(\d+)"', instruction.attributes):
        return f'chain {found[1]}'
    if '"async_collective_fusion_config"' not in instruction.attributes:
        return ''
    found = re.search(r'channel_id=(\d+)', instruction.attributes)
    return f'channel {found[1]}' if found else ''


def _describe(
    program: HloProgram,
    instruction: Instruction,
    inside: Computation,
    visit: Visit,
    mesh: MeshAxes | None,
    overlaps: bool,
) -> Collective:
    names = instruction.operands
    places: tuple[int, ...] = ()
    if instruction.opcode == 'send':
        kind, size = _between_slices(instruction)
        network, names = 'dcn', names[:1]
        axes = tuple(mesh.slices) if mesh else ()
    else:
        kind, network = instruction.opcode.removesuffix('-start'), 'ici'
        groups = parse_groups(instruction.attributes, program.num_devices)
        axes, size = mesh.within(groups) if mesh else (), len(groups[0])
        if mesh and kind != 'collective-permute':
            places = mesh.places_of(groups, axes)
        if kind == 'all-reduce' and inside.name.startswith(_REDUCE_SCATTER):
            kind = 'reduce-scatter'
    given = [inside.instructions[name] for name in names]
    if inside.name.startswith(_REDUCE_SCATTER):  # operands are padded, to be divided by the devices
        given = [inside.instructions[o.operands[0]] if o.opcode == 'pad' else o for o in given]
    arrays = [array for one in given for array in one.outputs]
    return Collective(
        kind=kind,
        network=network,
        axes=axes,
        group_size=size,
        arrays=tuple(map(str, arrays)),
        wire_bytes=RING_SHARES[kind](size) * sum(array.nbytes for array in arrays),
        count=visit.times,
        op_name=instruction.op_name or visit.instruction.op_name,
        source=program.source_of(instruction) or program.source_of(visit.instruction),
        # A transfer between slices is started by a send and awaited by its send-done.
        asynchronous=overlaps or instruction.opcode.endswith('-start') or network == 'dcn',
        instruction=instruction.name,
        places=places,
        flops_meanwhile=products_meanwhile(program, instruction, inside)
        if instruction.opcode == 'collective-permute-start'
        else 0.0,
    )


def _between_slices(instruction: Instruction) -> tuple[str, int]:
    """The kind of an exchange between slices, and the number of slices in it."""
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    target = re.search(r'_xla_megascale_target="\{([^}]*)\}', instruction.attributes)
    name = kind[1].lower().replace('_', '-') if kind else ''
    slices = 0
    for part in target[1].split(',') if target else ():
        first, _, last = part.partition(':')
        slices += int(last or first) - int(first) + 1
    return (name if name in RING_SHARES else 'collective-permute'), max(slices, 2)


Groups = tuple[tuple[int, ...], ...]

_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}')
_IOTA = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_LISTS = re.compile(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}')
_PAIRS = re.compile(r'source_target_pairs=\{((?:\{[\d,]*\},?)*)\}')


def parse_groups(attributes: str, num_devices: int) -> Groups:
    """Returns the groups of devices of a collective, from the attributes of its instruction.

    The program's text has them in four formats: `mesh['data'=4,'model'=2] {'data'}`,
    `[2,4]<=[4,2]T(1,0)`, `{{0,2},{1,3}}`, and pairs of source and target. Each pair is a group.

    Args:
      attributes: the attributes, as text.
      num_devices: the number of devices, which form one group if the attributes list none.
    """
    if found := _MESH.search(attributes):
        return _groups_of_mesh(*found.groups())
    if found := _IOTA.search(attributes):
        shape, sizes = numbers_in(found[1]), numbers_in(found[2])
        order = numbers_in(found[3]) if found[3] else tuple(range(len(sizes)))
        return _rows(np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(shape))
    found = _PAIRS.search(attributes) or _LISTS.search(attributes)
    groups = tuple(
        numbers_in(group) for group in re.findall(r'\{([\d,]*)\}', found[1] if found else '')
    )
    return groups or (tuple(range(num_devices)),)


def axes_of_groups(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ, in the order of the mesh.

    Args:
      groups: numbers of devices, in the order of the mesh.
      axes: the size of each mesh axis. Their product must be the number of devices.
    """
    members = np.concatenate([np.array(group) for group in groups])
    firsts = np.repeat([group[0] for group in groups], [len(group) for group in groups])
    sizes = tuple(axes.values())
    places, first_places = np.unravel_index(members, sizes), np.unravel_index(firsts, sizes)
    varies = [bool((x != y).any()) for x, y in zip(places, first_places, strict=True)]
    return tuple(name for name, various in zip(axes, varies, strict=True) if various)


def _groups_of_mesh(mesh: str, ids: str | None, chosen: str) -> Groups:
    """The groups along axes, or along parts of them: 'data':(2)4 has 2 devices before it."""
    parts: list[tuple[int, bool]] = []  # the size of a part of an axis, and whether it is chosen
    wanted = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh):
        spans = [(int(b or 1), int(b or 1) * int(n or size)) for a, b, n in wanted if a == axis]
        cuts = sorted({1, int(size), *(cut for span in spans for cut in span)})
        for low, high in itertools.pairwise(cuts):
            parts.append((high // low, any(first <= low < last for first, last in spans)))
    sizes = [size for size, _ in parts]
    devices = np.array(device_ids(ids, math.prod(sizes))).reshape(sizes)
    inner = [i for i, (_, inside) in enumerate(parts) if inside]
    outer = [i for i, (_, inside) in enumerate(parts) if not inside]
    return _rows(devices.transpose(*outer, *inner).reshape(-1, math.prod(sizes[i] for i in inner)))


def device_ids(text: str | None, count: int) -> Sequence[int]:
    """The devices of a mesh: `7,6,5,4` or `[2,4]T(1,0)`, by default in ascending order.

    Args:
      text: how the text of a program writes them, or None.
      count: the number of devices.
    """
    if text is None:
        return range(count)
    if found := re.match(r'\[([\d,]+)\]T\(([\d,]+)\)', text):
        sizes = numbers_in(found[1])
        ids = np.arange(count).reshape(sizes).transpose(numbers_in(found[2])).flatten()
        return [int(n) for n in ids]
    return numbers_in(text)


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in groups)
