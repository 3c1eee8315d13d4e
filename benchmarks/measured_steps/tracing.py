"""The products and kernels of a traced train step, before the compiler."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from partitioning.products.bodies import bodies_of, count_devices, count_runs
from partitioning.products.flops import product_flops

# Operations that a library of the machine computes, by the beginning of the primitive's name.
_LIBRARY = ('dot_product_attention', 'fused_attention')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedProduct:
    """Equal matrix products of a traced function.

    Attributes:
      shapes: the types of the operands and of the result, such as 'bfloat16[8,128]'.
      flops: the FLOPs of one of them.
      count: how often they are computed in one call.
      devices: on how many devices each of them is computed with these shapes: 1 if the shapes are
        those of the whole arrays, and all devices together compute the product once.
    """

    shapes: tuple[str, ...]
    flops: float
    count: int
    devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedKernel:
    """Equal kernels of a traced function. Every device runs them with the same shapes.

    Attributes:
      name: the name of the kernel.
      grid: the number of steps of the kernel along each dimension.
      blocks: the shape of the block of each operand and result in one step.
      operands: the types of the operands.
      results: the types of the results.
      count: how often it runs in one call.
    """

    name: str
    grid: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    count: int


def find_products(jaxpr: Any) -> list[TracedProduct]:
    """Returns the matrix products of a jaxpr, without those inside of kernels."""
    counts: dict[tuple[Any, ...], int] = collections.defaultdict(int)
    for equation, times, devices in _visit(jaxpr, 1, 1):
        if equation.primitive.name == 'dot_general':
            arrays = *equation.invars, *equation.outvars
            shapes = (variable.aval.shape for variable in arrays)
            flops = product_flops('dot_general', equation.params, *shapes)
            counts[_types(arrays), flops, devices] += times
    return [
        TracedProduct(shapes=shapes, flops=flops, count=count, devices=devices)
        for (shapes, flops, devices), count in counts.items()
    ]


def find_traced_kernels(jaxpr: Any) -> list[TracedKernel]:
    """Returns the kernels of a jaxpr: those of Pallas, and attention by a library."""
    counts: dict[tuple[Any, ...], int] = collections.defaultdict(int)
    for equation, times, _ in _visit(jaxpr, 1, 1):
        name, grid, blocks = equation.primitive.name, (), ()
        if name == 'pallas_call':
            name, (grid, blocks) = _pallas_name(equation), _grid(equation.params['grid_mapping'])
        elif not name.startswith(_LIBRARY):
            continue
        operands, results = _types(equation.invars), _types(equation.outvars)
        counts[name, grid, blocks, operands, results] += times
    return [
        TracedKernel(
            name=name, grid=grid, blocks=blocks, operands=operands, results=results, count=count
        )
        for (name, grid, blocks, operands, results), count in counts.items()
    ]


def _pallas_name(equation: Any) -> str:
    info = equation.params.get('name_and_src_info')
    return str(getattr(info, 'name', None) or equation.params.get('name') or 'pallas_call')


def _grid(mapping: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    blocks = []
    for block in mapping.block_mappings:
        sizes = (getattr(n, 'block_size', n) for n in block.block_shape)
        blocks.append(tuple(n if isinstance(n, int) else 1 for n in sizes))
    return tuple(n if isinstance(n, int) else 0 for n in mapping.grid), tuple(blocks)


def _visit(jaxpr: Any, times: int, devices: int) -> Iterator[tuple[Any, int, int]]:
    """The equations outside of kernels, with how often they run, and on how many devices."""
    for equation in jaxpr.eqns:
        yield equation, times, devices
        if equation.primitive.name == 'pallas_call':
            continue
        inside, on = times * count_runs(equation), devices * count_devices(equation)
        for body in bodies_of(equation):
            yield from _visit(body, inside, on)


def _types(variables: Any) -> tuple[str, ...]:
    return tuple(v.aval.str_short() for v in variables)
