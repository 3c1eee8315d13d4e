"""What is computed from a value of a traced function, and the constraints around it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.jaxpr.naming import TracedValues
from meshwright.jaxpr.primitives import CONSTRAINTS, MOVES
from meshwright.jaxpr.values import Axes, Value

_STEPS = 12  # how many operations away a constraint still matters


class ValueGraph:
    """The uses of each value.

    Args:
      traced: the values of the function.
    """

    def __init__(self, traced: TracedValues):
        self.has_backward = any(value.backward for value in traced.values)
        self.values = traced.values
        self._users: dict[int, list[Value]] = collections.defaultdict(list)
        for value in traced.values:
            for operand in value.operands:
                for one in _with_origins(operand):
                    self._users[id(one)].append(value)
        self._of_arguments: dict[str, list[Value]] = collections.defaultdict(list)
        for value in traced.values:
            for path in {o.argument for o in value.operands if o.argument}:
                self._of_arguments[path].append(value)
        self._first_uses: dict[str, str] = {}
        for value in traced.values:
            for operand in value.operands if value.primitive not in MOVES else ():
                if operand.argument and value.line:
                    self._first_uses.setdefault(operand.argument, value.line)
        self._forward: dict[tuple[Any, ...], Value] = {}
        for value in traced.values:
            if not value.backward:
                self._forward.setdefault((value.stack, value.shape), value)

    def first_use(self, argument: str) -> str:
        """The user's line that first computes with an argument, or ''."""
        return self._first_uses.get(argument, '')

    def users(self, value: Value) -> Sequence[Value]:
        """The values that are computed from a value."""
        return self._users.get(id(value), ())

    def users_of_argument(self, path: str) -> Sequence[Value]:
        """The values that are computed from an argument, or from its part for one layer."""
        return self._of_arguments.get(path, ())

    def near(self, value: Value) -> Iterator[Value]:
        """Values that have the data of a value, before or after it, the near ones first."""
        pending, seen = [value], {id(value)}
        while pending and len(seen) < 32 * _STEPS:
            current = pending.pop(0)
            yield current
            makers = [o for one in current.operands for o in _with_origins(one)]
            for other in (*self.users(current), *makers):
                if id(other) not in seen and other.primitive and len(other.shape) > 1:
                    seen.add(id(other))
                    pending.append(other)

    def forward_twin(self, value: Value) -> Value | None:
        """The value of the forward pass of which a value is the gradient, by line and shape."""
        return self._forward.get((value.stack, value.shape)) if value.backward else None

    def constraints_after(self, value: Value) -> Iterator[Value]:
        """The constraints of the value itself, and of values of its shape or size made from it."""
        for near in self._equals(value):
            if near.primitive in CONSTRAINTS and near.layout is not None:
                yield near

    def products_of(self, value: Value) -> Iterator[Value]:
        """The products of the value itself, and of values of its shape or size made from it."""
        for near in self._equals(value):
            if near is value and near.primitive == 'dot_general':
                yield near
            yield from (user for user in self.users(near) if user.primitive == 'dot_general')

    def _equals(self, value: Value) -> Iterator[Value]:
        """The value, and values of its shape or size that are made from it, the near ones first."""
        pending, seen = [value], {id(value)}
        while pending and len(seen) < 8 * _STEPS:
            current = pending.pop(0)
            yield current
            for user in self.users(current):
                moved = user.primitive in MOVES and user.size == value.size
                if id(user) not in seen and (moved or user.shape == value.shape):
                    seen.add(id(user))
                    pending.append(user)


def _with_origins(value: Value) -> Iterator[Value]:
    """The value, and the values outside of loops and functions that it is a copy of."""
    pending, seen = [value], {id(value)}
    while pending:
        current = pending.pop()
        yield current
        for one in current.copied_from:
            if id(one) not in seen:
                seen.add(id(one))
                pending.append(one)


def lacks(constraint: Value, axes: Axes) -> bool:
    """Whether a constraint shards no dimension over one of some mesh axes."""
    used = {axis for entry in constraint.layout or () for axis in entry}
    return not set(axes) <= used
