"""The time to make a mesh of very many devices, compared with jax's create_device_mesh.

  python benchmarks/mesh_scale.py

It makes (data, 8) meshes of v5p slices of 16 x 16 x 16, 32 x 32 x 32 and 64 x 64 x 64 chips, and of
8 slices of 32 x 32 x 32. It times the first call of ours, then ours and jax's in alternation, and
prints medians. The devices are synthetic, except for one 32 x 32 x 32 slice, which libtpu describes
if it is installed. jax is called with allow_split_physical_axes=True, which these shapes require.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

jax.config.update('jax_platforms', 'cpu')

from jax.experimental import mesh_utils
from jax.sharding import Mesh

from benchmarks.timing import compare, growth, seconds
from partitioning import default_mesh, describe_topology

ROUNDS = 5
PARTITIONS = 8


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SyntheticDevice:
    """A v5p chip at a place in a slice whose hosts have 2 x 2 x 1 chips."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int
    core_on_chip: int = 0
    device_kind: str = 'TPU v5'
    platform: str = 'tpu'


def synthetic_slices(side: int, slices: int = 1) -> list[SyntheticDevice]:
    """Slices of side x side x side chips."""
    half = side // 2
    return [
        SyntheticDevice(
            id=x + side * (y + side * (z + side * s)),
            process_index=x // 2 + half * (y // 2 + half * (z + side * s)),
            coords=(x, y, z),
            slice_index=s,
        )
        for s in range(slices)
        for z in range(side)
        for y in range(side)
        for x in range(side)
    ]


def ours(devices: Sequence[Any]) -> Mesh:
    """The default mesh."""
    return default_mesh(PARTITIONS, devices=devices)


def peer(devices: Sequence[Any]) -> Mesh:
    """jax's mesh of the same shape."""
    slices = len({d.slice_index for d in devices}) if hasattr(devices[0], 'slice_index') else 1
    shape = (len(devices) // slices // PARTITIONS, PARTITIONS)
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            shape, (slices, 1), devices, allow_split_physical_axes=True
        )
    return Mesh(grid, ('data', 'model'))


def report(name: str, devices: Sequence[Any]) -> tuple[float, float]:
    """Prints the medians of ours and of jax, and their ratio; returns the medians, in seconds."""
    first = seconds(lambda: ours(devices))  # before any ring is cached
    mine, other, ratio = compare(lambda: ours(devices), lambda: peer(devices), ROUNDS)
    print(
        f'{name:35}  {len(devices):7,}  {first:8.3f} s  {mine:6.3f} s  {other:6.3f} s  {ratio:5.2f}'
    )
    return mine, other


def main() -> None:
    """Prints the table and the exponent of the growth."""
    print(f'{"machine":35}  devices  first call      ours       jax  ratio')
    try:
        described: list[Any] = []
        description = seconds(lambda: described.extend(describe_topology('v5p:32x32x32').devices))
        report('v5p:32x32x32, described', described)
        print(f'  (making the description took {description:.3f} s)')
    except RuntimeError as error:
        print(f'v5p:32x32x32, described: skipped ({error})')
    times = {
        side**3: report(f'{side} x {side} x {side}, synthetic', synthetic_slices(side))
        for side in (16, 32, 64)
    }
    report('8 slices of 32 x 32 x 32, synthetic', synthetic_slices(32, slices=8))
    few, many, exponents = growth(times)
    print(
        f'exponent of the growth of time from {few:,} to {many:,} devices: ours '
        f'{exponents[0]:.2f}, jax {exponents[1]:.2f}'
    )


if __name__ == '__main__':
    main()
