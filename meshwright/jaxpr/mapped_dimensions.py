"""Which dimensions of the arguments and results of a shard_map are computed independently.

    @partial(jax.shard_map, mesh=mesh, in_specs=(P('data'), P('data')), out_specs=P('data'))
    def attention(q, k):                                # (batch, heads, length, features)
        return softmax(einsum('bhqd,bhkd->bhqk', q, k))

No head of the result needs another head of q or of k. So the second dimension of all three could be
sharded along another mesh axis, with the same results. Their third dimensions could not, because
each query is compared with all keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.factors import WHOLE
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.values import (
    TO_GLOBAL,
    TO_LOCAL,
    Block,
    Place,
    Step,
    Value,
    carries,
    steps_in,
    ties,
)
from meshwright.user_lines import line_of_specs, user_line

_MARKS = ('pvary', 'pbroadcast')  # they say along which axes arrays differ, and exchange nothing


@dataclasses.dataclass(frozen=True, eq=False)
class MappedFunction:
    """A shard_map of a traced function.

    Attributes:
      equation: its equation.
      place: where the equation is.
      given, made: its arguments and results, as steps from the whole array to the part of a device
        and back. Results that only the backward pass takes are not among them.
      steps: the steps in between.
      before: the arguments as they are laid out before they are brought into it.
    """

    equation: Any
    place: Place
    given: tuple[Step, ...]
    made: tuple[Step, ...]
    steps: tuple[Step, ...]
    before: tuple[Value, ...]

    @property
    def line(self) -> str:
        """The 'file:line' of its specs: if known, or else of its call."""
        return line_of_shard_map(self.place)

    @property
    def called_at(self) -> str:
        """The user's 'file:line' that calls it."""
        return user_line(self.place.lines)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its arguments; () if they are not known."""
        about = getattr(self.equation.params['jaxpr'], 'debug_info', None)
        names = tuple(getattr(about, 'arg_names', None) or ())
        return names if len(names) == len(self.equation.invars) and all(names) else ()

    def uses(self, axis: str) -> bool:
        """Whether its devices differ along a mesh axis: by a spec, by an exchange or by number."""
        return self.has_spec(axis) or any(True for _ in self.exchanges(axis))

    def has_spec(self, axis: str) -> bool:
        """Whether a spec has a mesh axis, or the axis is automatic inside."""
        if axis not in self.given_axes:
            return True
        borders = [step.inputs[0] for step in self.given] + [step.outputs[0] for step in self.made]
        return any(axis in (own or ()) for value in borders for own in value.axes)

    def exchanges(self, axis: str) -> Iterator[Step]:
        """The operations inside that name a mesh axis, such as sums and the number of a device."""
        for step in self.steps:
            if step.name not in _MARKS and (
                axis in exchange_axes(step) or step.params.get('axis_name') == axis
            ):
                yield step

    @property
    def given_axes(self) -> frozenset[str]:
        """The mesh axes over which it takes its arguments apart."""
        first = (*self.given, *self.made)
        return frozenset(first[0].params['axes']) if first else frozenset()

    def independent(self, value: Value, d: int) -> dict[int, int] | None:
        """The dimensions that can be sharded together with a dimension of a part, if any can.

        Args:
          value: the part of an argument or of a result that a device has.
          d: the number of its dimension.

        Returns:
          For the id of each part, the number of its dimension; None if some operation needs all of
          the dimension, or nobody knows what it needs.
        """
        return _Group(self.steps).grow(value, d)


def line_of_shard_map(place: Place) -> str:
    """The 'file:line' of the specs of a shard_map: if known, or else of its call."""
    jaxpr = place.equation.params['jaxpr']
    about = getattr(getattr(jaxpr, 'debug_info', None), 'func_src_info', '')
    return line_of_specs(str(about or '')) or user_line(place.lines)


def lines_of_shard_maps(place: Place) -> tuple[str, ...]:
    """The 'file:line' of the specs of each shard_map around an operation."""
    return tuple(line_of_shard_map(around) for around in shard_maps_around(place))


def shard_maps_of(block: Block) -> dict[int, Place]:
    """The places of all shard_maps of a function, by the ids of their equations."""
    borders = (step for step in steps_in(block) if step.name in (TO_LOCAL, TO_GLOBAL))
    return {id(step.place.equation): step.place for step in borders}


def find_mapped_functions(block: Block) -> Iterator[MappedFunction]:
    """Yields the shard_maps of the forward pass of a function.

    Args:
      block: the steps of the function.
    """
    taken = {id(value) for value in block.outputs}
    _add_taken(block, taken)
    borders: dict[int, list[Step]] = {}
    inside: dict[int, list[Step]] = {}
    moved: dict[int, Step] = {}  # what brings arguments into a shard_map, by its results
    for step in steps_in(block):
        if step.name in (TO_LOCAL, TO_GLOBAL):
            borders.setdefault(id(step.place.equation), []).append(step)
        elif _is_shard_map(step.place):
            moved |= {id(value): step for value in step.outputs}
        if not step.is_border or step.name == TO_LOCAL:
            for around in shard_maps_around(step.place):
                inside.setdefault(id(around.equation), []).append(step)
    for own in borders.values():
        given = tuple(step for step in own if step.name == TO_LOCAL)
        made = [step for step in own if step.name == TO_GLOBAL]
        if own[0].place.is_backward:
            continue
        before = []
        for border in given:
            value = border.inputs[0]
            while (mover := moved.get(id(value))) is not None and mover.place is border.place:
                value = mover.inputs[0]
            before.append(value)
        yield MappedFunction(
            equation=own[0].place.equation,
            place=own[0].place,
            given=given,
            before=tuple(before),
            made=tuple(step for step in made if id(step.outputs[0]) in taken),
            steps=tuple(inside.get(id(own[0].place.equation), ())),
        )


def _add_taken(block: Block, taken: set[int]) -> None:
    """Adds the ids of the values that the forward pass takes, from the last step to the first."""
    for step in reversed(block.steps):
        if step.place.is_backward:
            continue
        taken |= {id(value) for value in step.inputs}
        for body in step.bodies:
            pairs = zip(step.outputs, body.outputs, strict=True)
            taken |= {id(inner) for outer, inner in pairs if id(outer) in taken}
        taken |= {id(returned) for _, returned in carries(step)}
        for body in step.bodies:
            _add_taken(body, taken)


def shard_maps_around(place: Place) -> Iterator[Place]:
    """The places of the shard_maps around an operation, the innermost first."""
    around = place.around
    while around is not None:
        if _is_shard_map(around):
            yield around
        around = around.around


def _is_shard_map(place: Place) -> bool:
    return getattr(getattr(place.equation, 'primitive', None), 'name', '') == 'shard_map'


class _Group:
    """Dimensions that belong together, because operations relate them."""

    def __init__(self, steps: Iterable[Step]):
        self._steps = tuple(steps)
        self._found: dict[int, int] = {}
        self._is_split = True

    def grow(self, value: Value, d: int) -> dict[int, int] | None:
        """All dimensions that belong to one, or None if they cannot be divided."""
        self._found, self._is_split = {id(value): d}, True
        before = 0
        while self._is_split and before < len(self._found):
            before = len(self._found)
            for step in self._steps:
                self._spread(step)
        return self._found if self._is_split else None

    def _spread(self, step: Step) -> None:
        if step.bodies:
            for tie in ties(step):
                self._pair(tie.outer, tie.inner, int(tie.stacked))
            for given, returned in carries(step):
                self._pair(given, returned, 0)
            return
        values = (*step.inputs, *step.outputs)
        if not any(id(value) in self._found for value in values):
            return
        if step.name == 'iota':  # what is computed depends on the position
            self._is_split = False
            return
        factors = find_factors(step)
        arrays = (*factors.inputs, *factors.outputs)
        touched = set[int]()
        for value, array in zip(values, arrays, strict=True):
            if (d := self._found.get(id(value))) is None:
                continue
            if not array[d]:
                self._is_split = False
                return
            touched.add(array[d][0])
        for factor in touched:
            if factor in factors.summed or factors.sizes[factor] == WHOLE or not factors.known:
                self._is_split = False
        for value, array in zip(values, arrays, strict=True):
            for d, dim in enumerate(array):
                if dim and dim[0] in touched and value.constant is None:
                    self._add(value, d)

    def _pair(self, outer: Value, inner: Value, shift: int) -> None:
        if (d := self._found.get(id(outer))) is not None:
            if d < shift:
                self._is_split = False  # the iterations of a loop
            else:
                self._add(inner, d - shift)
        if (d := self._found.get(id(inner))) is not None:
            self._add(outer, d + shift)

    def _add(self, value: Value, d: int) -> None:
        if self._found.setdefault(id(value), d) != d:
            self._is_split = False  # two dimensions of one array
