"""The groups of devices that exchange data in a collective, and the mesh axes that they span."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

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
        shape, sizes = _numbers(found[1]), _numbers(found[2])
        order = _numbers(found[3]) if found[3] else tuple(range(len(sizes)))
        return _rows(np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(shape))
    found = _PAIRS.search(attributes) or _LISTS.search(attributes)
    groups = tuple(
        _numbers(group) for group in re.findall(r'\{([\d,]*)\}', found[1] if found else '')
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
    devices = np.array(_device_ids(ids, math.prod(sizes))).reshape(sizes)
    inner = [i for i, (_, inside) in enumerate(parts) if inside]
    outer = [i for i, (_, inside) in enumerate(parts) if not inside]
    return _rows(devices.transpose(*outer, *inner).reshape(-1, math.prod(sizes[i] for i in inner)))


def _device_ids(text: str | None, count: int) -> Sequence[int]:
    """The devices of a mesh: `7,6,5,4` or `[2,4]T(1,0)`, by default in ascending order."""
    if text is None:
        return range(count)
    if found := re.match(r'\[([\d,]+)\]T\(([\d,]+)\)', text):
        sizes = _numbers(found[1])
        ids = np.arange(count).reshape(sizes).transpose(_numbers(found[2])).flatten()
        return [int(n) for n in ids]
    return _numbers(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r'\d+', text))


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in groups)
