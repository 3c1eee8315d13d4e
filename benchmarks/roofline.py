"""The rows of compiled_step.py as shares of the limits of their chips, and what holds each back.

A step takes at least the time of its matrix products at the peak of the chip, and of its bytes at
the rate of the links. The products are counted from the jaxpr, with those that are computed twice
to save memory. Nothing here is measured: memory, estimated computation and bytes are from the
compiler, the limits from `partitioning.CHIPS`, and shares are a bound, not a forecast.

- compute: the time of the products at peak / the estimated computation. The estimate has no
  kernels, so with attention as a kernel the share can exceed 100%, most of all for long rows; the
  products include the masked blocks that such a kernel may skip.
- memory: the peak of the memory / what the chip has.
- wire: the time in which all links of a chip send the bytes / the time of the products.

Usage:
  python benchmarks/roofline.py [--rows=1b,8b_fsdp] [--results=FILE] [--again]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from compiled_step import collect, make_parser

from partitioning.hardware import CHIPS


def describe(name: str, found: Mapping[str, Any]) -> list[str]:
    """Returns lines about one row: its shares, and what holds it back."""
    chip = CHIPS[found['chip']]
    products = 1e3 * found['flops'] / chip.peak_flops_per_device  # ms
    links = chip.ici_links * chip.ici_link_bandwidth / chip.devices
    wire = 1e3 * found['wire'] * 1e9 / links
    matmuls = 1e3 * found['matmul_cycles'] / chip.clock_hz
    lines = [
        f'{name} on {chip.name}: products at peak {products:.0f} ms, '
        f'{products / found["compute"]:.0%} of the estimate of {found["compute"]:.0f} ms '
        f'({found["compute"] / matmuls:.2f} times its matrix products alone); memory '
        f'{found["peak"] * 1e9 / chip.hbm_bytes_per_device:.0%} of {chip.hbm_bytes / 1e9:.0f} GB; '
        f'wire at least {wire:.0f} ms, {wire / products:.0%} of the products'
    ]
    if found['dcn'] and chip.dcn_bandwidth:
        between = 1e3 * found['dcn'] * 1e9 / chip.dcn_bandwidth
        lines.append(f'  between slices: {found["dcn"]:.2f} GB, at least {between:.0f} ms')
    for operation in [o for o in found['operations'] if o['kind'] != 'matmul'][:2]:
        time = 1e3 * operation['cycles'] / chip.clock_hz
        lines.append(f'  {time:.1f} ms: {operation["kind"]}{_at(operation)}')
    for one in found['collectives'][:2]:
        size = one['wire_bytes'] * one['count'] / 1e9
        axes = ', '.join(one['axes'])
        lines.append(f'  {size:.2f} GB of wire: {one["kind"]} over {axes}{_at(one)}')
    for array in found['arrays'][:2]:
        lines.append(f'  {array["nbytes"] / 1e9:.2f} GB of memory: {array["array"]}{_at(array)}')
    return lines


def _at(one: Mapping[str, Any]) -> str:
    """Where in the program something is."""
    folder, file = os.path.split(one['source'])
    places = [os.path.join(os.path.basename(folder), file)] if file else []
    return ', '.join(['', *places, one['op_name'].rpartition('/')[2]])


def main() -> None:
    results = collect(make_parser(__doc__.splitlines()[0]).parse_args())
    for name, found in results.items():
        print('\n'.join(describe(name, found)))


if __name__ == '__main__':
    main()
