"""A traced function as values, and as steps that make values from values.

For `y = jnp.tanh(x @ w)` with x ('batch', 'embed') and w ('embed', 'mlp'), the steps are

    dot_general  x, w -> p     p: float32[32, 256], dims ('batch', 'mlp'), made in line 12
    tanh         p -> y        y: float32[32, 256], dims ('batch', 'mlp'), made in line 12

Calls are written out in place. Loops and branches have bodies, which are blocks of steps.
A `Tie` connects a value inside a body with the same value outside. Other modules annotate the
values: `naming` adds the names of dimensions and the role of a value, `layouts` the mesh axes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util

from meshwright.jaxpr.factors import Factors
from meshwright.user_lines import stack_of_traceback, user_line
from partitioning.products.flops import count_scan_arguments

Axes = tuple[str, ...]

# Steps at the border of a shard_map: the array as a whole <-> the part of it in one shard.
TO_LOCAL, TO_GLOBAL = 'to_local', 'to_global'
_ROLLS = frozenset(('_roll_static', '_roll_dynamic'))  # the names of jnp.roll in programs


class Dim(NamedTuple):
    """What is known of a dimension of a value.

    Attributes:
      name: its logical axis, or None if it has none.
      axes: the mesh axes that shard it in the argument or the constraint that it comes from.
      argument: the path of that argument, or ''.
      number: the number of the dimension in that argument.
    """

    name: str | None
    axes: Axes
    argument: str
    number: int = 0


Dims = tuple[Dim | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where an operation is in a program.

    Attributes:
      path: the names of the transformations and scopes around it: 'transpose(jvp(Model))/layer'.
      functions: the names of the jitted functions around it.
      equation: the equation that it comes from, or None.
      around: the place of the call or loop around it, or None.
    """

    path: str = ''
    functions: frozenset[str] = frozenset()
    equation: Any = None
    around: Place | None = None

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """The 'file:line' of the code and of its callers, innermost first, without lines of jax."""
        info = None if self.equation is None else self.equation.source_info
        lines = stack_of_traceback(None if info is None else info.traceback)
        return lines or (self.around.lines if self.around is not None else ())

    @functools.cached_property
    def source(self) -> str:
        """The 'file:line' of the innermost Python code that is not jax's, or ''."""
        if self.equation is None:
            return ''
        parts = source_info_util.summarize(self.equation.source_info).split(' ')[0].split(':')
        return ':'.join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else ''

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """The words of its path, and the functions around it."""
        return words_of(self.path) | self.functions

    @functools.cached_property
    def is_backward(self) -> bool:
        """Whether it is a part of a backward pass. jax marks it in the path."""
        return is_backward(self.path)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of a traced function.

    Attributes:
      shape: its shape; inside a shard_map, the shape of one shard.
      dtype: its type.
      axes: the mesh axes of each dimension; None while nothing shards it.
      fixed: the dimensions that keep their mesh axes, because the program says so.
      dims: what is known of each dimension, or None.
      manual: the mesh axes of the shard_maps around it, over which its shape is already divided.
      on_host: whether it is in the memory of the host.
      constant: its elements, if the program states them.
      maker: the step that makes it, or None for an argument. Inputs of a body
        and results of a loop have the maker of the value that they copy.
      place: where it is made.
      operands: the values that it is made from.
      copied_from: the same value on the other side of the border of a body. The carry of a loop is
        copied from an input of the loop and from a result of an iteration.
      contracted: the dimensions that its maker sums over.
      layout: the mesh axes of each dimension, if a constraint states them.
      argument: the path of the argument that it is, possibly cast, sliced or moved; '' for others.
      gradient_of: the path of the parameter that it is a gradient of; '' for others.
      update_of: the path of the array of the state that it updates; '' for others.
      helpers: lines of the program that stand for their callers.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: list[Axes | None]
    fixed: list[bool]
    dims: Dims
    manual: frozenset[str] = frozenset()
    on_host: bool = False
    constant: Any = None
    maker: Step | None = None
    place: Place = Place()
    operands: tuple[Value, ...] = ()
    copied_from: tuple[Value, ...] = ()
    contracted: Dims = ()
    layout: tuple[Axes, ...] | None = None
    argument: str = ''
    gradient_of: str = ''
    update_of: str = ''
    helpers: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the whole array in bytes."""
        return math.ceil(self.size * item_size(self.dtype))

    def shard_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape on one device, for a mesh with axes of these sizes."""
        return tuple(
            -(-n // math.prod(sizes[axis] for axis in axes or ()))
            for n, axes in zip(self.shape, self.axes, strict=True)
        )

    def shard_bytes(self, sizes: Mapping[str, int]) -> int:
        """The size on one device in bytes."""
        return math.ceil(math.prod(self.shard_shape(sizes)) * item_size(self.dtype))

    def fix(self, axes: Sequence[Axes | None]) -> None:
        """Fixes the mesh axes of dimensions; None leaves a dimension as it is."""
        for d, one in enumerate(axes):
            if one is not None:
                self.axes[d], self.fixed[d] = one, True

    def with_axes(self, axes: Sequence[Axes | None]) -> Value:
        """A copy of the array with other mesh axes, all of them fixed."""
        copy = Value.__new__(Value)
        for name in _FIELDS:
            setattr(copy, name, getattr(self, name))
        copy.axes, copy.fixed = [one or () for one in axes], [True] * len(self.shape)
        return copy

    @property
    def names(self) -> tuple[str | None, ...]:
        """The logical axes of its dimensions."""
        return tuple(d.name if d else None for d in self.dims)

    @property
    def primitive(self) -> str:
        """The operation that makes it; '' for arguments."""
        return self.maker.name if self.maker is not None else ''

    @property
    def backward(self) -> bool:
        """Whether it is a part of a backward pass."""
        return self.maker is not None and self.maker.place.is_backward

    @property
    def stack(self) -> tuple[str, ...]:
        """The 'file:line' of the code that makes it, and of its callers."""
        return self.place.lines

    @property
    def line(self) -> str:
        """The user's 'file:line' that makes this value."""
        return user_line(self.stack, self.helpers)

    def rolls_stages(self, d: int, sizes: Mapping[str, int]) -> bool:
        """Whether jnp.roll moves a dimension that has one element for each device of an axis.

        Pipelines pass the state of a stage on to the next one so.
        """
        rolled = self.maker is not None and bool(_ROLLS & self.maker.place.functions)
        alike = [one for one in (self, *self.operands) if len(one.shape) == len(self.shape)]
        return rolled and max(one.shape[d] for one in alike) in sizes.values()

    @property
    def loop(self) -> tuple[str, ...]:
        """The 'file:line' of the loop that stacks this value, and of its callers; or ()."""
        return self.maker.place.lines if self.maker and self.maker.name == 'scan' else ()


_FIELDS = tuple(field.name for field in dataclasses.fields(Value))


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One operation.

    Attributes:
      name: the name of the primitive.
      params: its parameters.
      inputs, outputs: its arrays.
      bodies: the blocks that it runs: the body of a loop, or the branches of a `cond`.
      times: how often it runs them.
      place: where it is in the program.
      is_border: whether it only brings an array into or out of a shard_map.
      factors: how the dimensions of its arrays are related, once `find_factors` has found it.
    """

    name: str
    params: Mapping[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    bodies: tuple[Block, ...] = ()
    times: int = 1
    place: Place = Place()
    is_border: bool = False
    factors: Factors | None = None

    @property
    def line(self) -> str:
        """The 'file:line' of the user that it comes from."""
        helpers = self.outputs[0].helpers if self.outputs else frozenset[str]()
        return user_line(self.place.lines, helpers) or self.place.source

    @property
    def op_name(self) -> str:
        """The path of the jax operation."""
        return f'{self.place.path}/{self.name}' if self.place.path else self.name


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """Steps in their order, with the arrays that they are given and that they return."""

    inputs: list[Value]
    steps: list[Step]
    outputs: list[Value]


def steps_in(block: Block) -> Iterator[Step]:
    """All steps, each before the steps of its bodies."""
    for step in block.steps:
        yield step
        for body in step.bodies:
            yield from steps_in(body)


def readers_of(steps: Iterable[Step]) -> dict[int, list[Step]]:
    """The steps that read each value, by its id."""
    readers: dict[int, list[Step]] = collections.defaultdict(list)
    for step in steps:
        for value in step.inputs:
            readers[id(value)].append(step)
    return readers


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
    """Yields what an iteration of a loop is given, with what it returns to the next iteration."""
    consts, carry = loop_counts(step)
    for body in step.bodies if carry else ():
        yield from zip(body.inputs[consts:][:carry], body.outputs[:carry], strict=True)


def loop_counts(step: Step) -> tuple[int, int]:
    """The number of constants of a loop, and of arrays that it carries; (0, 0) for other steps."""
    if step.name == 'while':
        return step.params['body_nconsts'], len(step.outputs)
    return count_scan_arguments(step.params) if step.name == 'scan' else (0, 0)


@functools.cache
def item_size(dtype: Any) -> float:
    """The size of an element in bytes; types of 4 bits have half a byte."""
    name = str(dtype)
    if name in ('int4', 'uint4', 'float4_e2m1fn'):
        return 0.5
    return getattr(dtype, 'itemsize', 4)


def is_backward(path: str) -> bool:
    """Whether the path of an operation is in a backward pass, in jaxprs and compiled programs."""
    return 'transpose(' in path


def words_of(path: str) -> frozenset[str]:
    """The words of the path of an operation, without the words of transformations."""
    text = path
    for bracket in '()/:':
        text = text.replace(bracket, ' ')
    return frozenset(text.split()) - {'jvp', 'transpose', 'vmap', 'jit'}
