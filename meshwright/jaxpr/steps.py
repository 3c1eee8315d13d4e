"""A traced function as steps on arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import source_info_util

from meshwright.user_lines import stack_of_traceback

Axes = tuple[str, ...]

# Steps at the border of a shard_map: the array as a whole <-> the part of it in one shard.
TO_LOCAL, TO_GLOBAL = 'to_local', 'to_global'


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of a traced function.

    Attributes:
      shape: its shape; inside a shard_map, that of one shard.
      dtype: its type.
      dims: the mesh axes of each dimension; None while nothing shards it.
      fixed: the dimensions that keep their layout, because the program says so.
      manual: the mesh axes of the shard_maps around it, over which its shape is already divided.
      on_host: whether it is in the memory of the host.
    """

    shape: tuple[int, ...]
    dtype: Any
    dims: list[Axes | None]
    fixed: list[bool]
    manual: frozenset[str] = frozenset()
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the whole array in bytes."""
        return math.ceil(math.prod(self.shape) * item_size(self.dtype))

    def shard_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape on one device, for a mesh with axes of these sizes."""
        return tuple(
            -(-n // math.prod(sizes[axis] for axis in axes or ()))
            for n, axes in zip(self.shape, self.dims, strict=True)
        )

    def shard_bytes(self, sizes: Mapping[str, int]) -> int:
        """The size on one device in bytes."""
        return math.ceil(math.prod(self.shard_shape(sizes)) * item_size(self.dtype))

    def fix(self, dims: Sequence[Axes | None]) -> None:
        """Keeps the layout of all dimensions but those that are None."""
        for d, axes in enumerate(dims):
            if axes is not None:
                self.dims[d], self.fixed[d] = axes, True


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One operation.

    Attributes:
      name: the name of the primitive.
      params: its parameters.
      inputs, outputs: its arrays.
      bodies: what it executes itself: the body of a loop, the branches of a `cond`.
      times: how often it executes them.
      equation: where it comes from, or None.
      stack: the names of the transformations and scopes around it.
    """

    name: str
    params: Mapping[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    bodies: tuple[Block, ...] = ()
    times: int = 1
    equation: Any = None
    stack: str = ''

    @property
    def source(self) -> str:
        """The 'file:line' of the innermost Python code that is not jax's, or ''."""
        return source_of(self.equation) if self.equation is not None else ''

    @property
    def call_stack(self) -> tuple[str, ...]:
        """The 'file:line' of that code and of its callers."""
        info = None if self.equation is None else self.equation.source_info
        return stack_of_traceback(None if info is None else info.traceback)

    @property
    def op_name(self) -> str:
        """The path of the jax operation."""
        return f'{self.stack}/{self.name}' if self.stack else self.name

    @property
    def is_backward(self) -> bool:
        """Whether it is a part of a backward pass."""
        return 'transpose(' in self.stack


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """Steps in their order, with the arrays that they are given and that they return."""

    inputs: list[Value]
    steps: list[Step]
    outputs: list[Value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tie:
    """Two arrays that are the same inside and outside of a body.

    Attributes:
      outer, inner: the arrays.
      stacked: whether `outer` has the values of all iterations along its first dimension.
      output: whether it is a result of the body.
    """

    outer: Value
    inner: Value
    stacked: bool
    output: bool


def ties(step: Step) -> Iterator[Tie]:
    """The arrays that the bodies of a step share with its surroundings."""
    consts, carry = loop_counts(step)
    for body in step.bodies:
        given = step.inputs[len(step.inputs) - len(body.inputs) :]  # not the index of a `cond`
        for i, (outer, inner) in enumerate(zip(given, body.inputs, strict=True)):
            stacked = step.name == 'scan' and i >= consts + carry
            yield Tie(outer=outer, inner=inner, stacked=stacked, output=False)
        for i, (outer, inner) in enumerate(zip(step.outputs, body.outputs, strict=True)):
            stacked = step.name == 'scan' and i >= carry
            yield Tie(outer=outer, inner=inner, stacked=stacked, output=True)


def carries(step: Step) -> Iterator[tuple[Value, Value]]:
    """What a loop passes from one iteration to the next: what it is given, and what it returns."""
    consts, carry = loop_counts(step)
    for body in step.bodies if carry else ():
        yield from zip(body.inputs[consts:][:carry], body.outputs[:carry], strict=True)


def loop_counts(step: Step) -> tuple[int, int]:
    """The number of constants of a loop, and of arrays that it passes on; (0, 0) if it is none."""
    params = step.params
    if step.name == 'while':
        return params['body_nconsts'], len(step.outputs)
    if step.name != 'scan':
        return 0, 0
    if 'num_carry' in params:
        return params['num_consts'], params['num_carry']
    consts, carry, _ = params['ft_in'].unpack()  # from jax 0.12 on
    return len(consts), len(carry)


def item_size(dtype: Any) -> float:
    """The size of an element in bytes; types of 4 bits have half a byte."""
    name = str(dtype)
    if name in ('int4', 'uint4', 'float4_e2m1fn'):
        return 0.5
    return getattr(dtype, 'itemsize', 4)


def source_of(equation: Any) -> str:
    """The 'file:line' of the innermost Python code of an equation that is not jax's, or ''."""
    text = source_info_util.summarize(equation.source_info)
    place = text.split(' ')[0]
    parts = place.split(':')
    return ':'.join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else ''
