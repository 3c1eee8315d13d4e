"""The mesh of a dumped program: as it is given, as the text says, or from groups of devices."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from meshwright.program.collectives import Groups, MeshAxes, device_ids
from meshwright.program.hlo_text import numbers_in

# `sdy.mesh @mesh = <["data"=4, "model"=2], device_ids=[...]>`, also in the attributes of HLO.
_OF_SHARDY = re.compile(
    r'(?:sdy\.mesh @(?P<name>\S+) = |#sdy\.mesh)'
    r'<\[(?P<axes>[^\]]*)\](?:, device_ids=\[(?P<ids>[^\]]*)\])?>'
)
# `replica_groups=mesh['data'=4,'model'=2] {'data'}`, and the same in `sharding={mesh[...], ...}`.
_OF_HLO = re.compile(
    r'(?:replica_groups=|sharding=\{)mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\),? )?'
)
_AXIS = re.compile(r"""\\?["']([^"'\\]*)\\?["']\s*=\s*(\d+)""")
_UNNAMED = re.compile(r'_?axis_\d+')


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of mesh axes, in their order, from 'data=4,model=2'.

    Raises:
      ValueError: if the text is malformed, or if an axis appears twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(','):
        name, _, size = (word.strip() for word in part.partition('='))
        if not name or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f'--mesh={text}: {part.strip()!r} must be AXIS=SIZE, as in --mesh=data=4,model=2'
            )
        if name in sizes:
            raise ValueError(f'--mesh={text} has the axis {name!r} twice: write each axis once')
        sizes[name] = int(size)
    return sizes


def check_mesh(sizes: Mapping[str, int], num_devices: int) -> MeshAxes:
    """Returns the axes of a mesh that a caller gave.

    Raises:
      ValueError: if the mesh does not have the devices of the program.
    """
    total = math.prod(sizes.values())
    if total != num_devices:
        written = ','.join(f'{name}={size}' for name, size in sizes.items())
        raise ValueError(
            f'the mesh {written} has {total:,} devices, and the program runs on {num_devices:,}: '
            f'give sizes whose product is {num_devices:,}'
        )
    return MeshAxes(sizes=dict(sizes))


def over_slices(mesh: MeshAxes, num_devices: int) -> MeshAxes:
    """A mesh of several slices with the number of slices along its axes: the first ones span them.

    Args:
      mesh: the mesh of all slices.
      num_devices: the number of devices of one slice.
    """
    spans, left = {}, math.prod(mesh.sizes.values()) // num_devices
    for axis, size in mesh.sizes.items():
        if (count := math.gcd(size, left)) > 1:
            spans[axis] = count
            left //= count
    return MeshAxes(sizes=mesh.sizes, slices=spans)


def find_mesh(texts: Iterable[str], num_devices: int | None = None) -> MeshAxes | None:
    """Returns the mesh that texts of a program name, or None if they name none.

    Of several, the first one with the most axes of several devices is taken.

    Args:
      texts: texts of the program at any stage.
      num_devices: the number of its devices, which a mesh must have; None takes the largest mesh.
    """
    found = []
    for text in texts:
        found += [mesh for _, mesh in shardy_meshes(text)]
        for axes, ids in dict.fromkeys(_OF_HLO.findall(text)):
            sizes = _sizes(axes)
            if not any(map(_UNNAMED.fullmatch, sizes)):
                order = device_ids(ids, math.prod(sizes.values())) if ids else ()
                found.append(MeshAxes(sizes=sizes, order=tuple(order)))
    totals = [math.prod(mesh.sizes.values()) for mesh in found]
    wanted = num_devices or max(totals, default=1)
    fitting = [mesh for mesh, total in zip(found, totals, strict=True) if total == wanted]
    return max(fitting, key=lambda m: sum(n > 1 for n in m.sizes.values()), default=None)


def shardy_meshes(text: str) -> list[tuple[str, MeshAxes]]:
    """The meshes that Shardy writes in a text, each with its name, or ''."""
    return [
        (one['name'] or '', MeshAxes(sizes=_sizes(one['axes']), order=numbers_in(one['ids'] or '')))
        for one in _OF_SHARDY.finditer(text)
    ]


def infer_mesh(groups: Iterable[Groups], num_devices: int) -> MeshAxes | None:
    """Returns a mesh in which all groups of devices lie along axes, or None if there is none.

    Its axes have the names 'axis_0', 'axis_1', ..., and it has as few of them as possible.

    Args:
      groups: the groups of each exchange.
      num_devices: the number of devices.
    """
    cuts = {1, num_devices}
    for some in groups:
        for group in _joined(some):
            strides = _strides(sorted(group))
            if strides is None:
                return None
            cuts |= {cut for stride, size in strides for cut in (stride, stride * size)}
    ordered = sorted(cuts, reverse=True)
    sizes = list(itertools.pairwise(ordered))
    if any(high % low for high, low in sizes):
        return None
    return MeshAxes(sizes={f'axis_{i}': high // low for i, (high, low) in enumerate(sizes)})


def _joined(groups: Groups) -> list[set[int]]:
    """Groups with common devices as one: the pairs of a ring are all of its devices."""
    joined: list[set[int]] = []
    for group in groups:
        touching = [other for other in joined if other & {*group}]
        joined = [other for other in joined if other not in touching]
        joined.append({*group}.union(*touching))
    return joined


def _strides(devices: Sequence[int]) -> list[tuple[int, int]] | None:
    """The strides and sizes whose sums are the distances of devices from the first, or None."""
    distances = {device - devices[0] for device in devices}
    strides: list[tuple[int, int]] = []
    covered = {0}
    while len(covered) < len(distances):
        stride, size = min(distances - covered), 1
        while {c + size * stride for c in covered} <= distances:
            size += 1
        covered = {c + i * stride for c in covered for i in range(size)}
        strides.append((stride, size))
        if size == 1:
            return None
    return strides if covered == distances else None


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in _AXIS.findall(text)}
