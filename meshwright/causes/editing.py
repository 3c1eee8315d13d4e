"""Edits a traced function as if its constraints or reshapes were written otherwise in its code.

    before                                      with ConstraintChange(source='model.py:40', ...)
    a = dot_general b c      # model.py:40      t = dot_general b c
    d = tanh a                                  a = sharding_constraint t
                                                d = tanh a

In the backward pass, the operands of the line are constrained in place of its results, because they
are the gradients of the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.causes.cause import ConstraintChange, ConstraintRemoval, SplitChange
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.user_lines import find_helpers, stack_of_traceback, user_line
from partitioning.products.flops import bodies_of
from partitioning.rules import from_tuple


def edit_jaxpr(
    jaxpr: Any,
    change: ConstraintChange | ConstraintRemoval,
    mesh: Any,
    helpers: frozenset[str] | None = None,
) -> Any:
    """Returns a ClosedJaxpr with a change of its constraints.

    Args:
      jaxpr: the ClosedJaxpr.
      change: the change.
      mesh: the mesh of new constraints.
      helpers: lines that stand for the lines that call them, by default the helpers of the jaxpr.
        After a first edit, its constraints may differ where they were alike.

    Raises:
      ValueError: if no operation of the line matches the change.
    """
    if helpers is None:
        helpers = find_helpers(_constraints(jaxpr.jaxpr, ()))
    editor = _Editor(change, mesh, helpers)
    edited = jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr, backward=False, caller=()))
    if not editor.count:
        raise ValueError(f'no operation of {change.source} matches "{change}"')
    return edited


def with_bodies(equation: Any, edit: Callable[[Any], Any]) -> Any:
    """Returns an equation whose jaxprs, such as the body of a loop, are edited."""

    def change(value: Any) -> Any:
        if isinstance(value, tuple | list) and any(hasattr(x, 'eqns') for x in value):
            return type(value)(map(change, value))
        if not hasattr(value, 'eqns'):
            return value
        if hasattr(value, 'jaxpr') and value.jaxpr is not value:
            return value.replace(jaxpr=edit(value.jaxpr))
        return edit(value)

    return equation.replace(params={name: change(x) for name, x in equation.params.items()})


def _constraints(jaxpr: Any, caller: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """The call stack and the layout of each constraint in a jaxpr and in those inside of it."""
    found = []
    for equation in jaxpr.eqns:
        stack = stack_of_traceback(equation.source_info.traceback) or caller
        if equation.primitive.name in CONSTRAINTS:
            params = equation.params
            sharding = params.get('sharding', params.get('dst_sharding'))
            found.append((stack, str(getattr(sharding, 'spec', None))))
        for body in bodies_of(equation):
            found += _constraints(getattr(body, 'jaxpr', body), stack)
    return found


class _Editor:
    """Edits the equations of a jaxpr and of all jaxprs inside of it.

    Args:
      change: the change.
      mesh: the mesh of the new constraints.
      helpers: lines that stand for the lines that call them.
    """

    def __init__(
        self, change: ConstraintChange | ConstraintRemoval, mesh: Any, helpers: frozenset[str]
    ):
        self._change, self._mesh, self._helpers = change, mesh, helpers
        self.count = 0  # how many constraints were added or replaced

    def edit(self, jaxpr: Any, *, backward: bool, caller: tuple[str, ...]) -> Any:
        """Returns the jaxpr with the change; `caller` is the stack for equations that have none."""
        equations: list[Any] = []
        for equation in jaxpr.eqns:
            is_backward = backward or 'transpose(' in str(equation.source_info.name_stack)
            stack = stack_of_traceback(equation.source_info.traceback) or caller
            edited = equation
            if bodies_of(equation):
                edit = functools.partial(self.edit, backward=is_backward, caller=stack)
                edited = with_bodies(equation, edit)
            if user_line(stack, self._helpers) != self._change.source:
                equations.append(edited)
            elif isinstance(self._change, ConstraintRemoval) or self._change.replaces:
                # Other operations of the line, such as a print, may have no results.
                if edited.primitive.name in CONSTRAINTS and self._is_for(edited.outvars[0]):
                    self.count += 1  # a removal leaves all dimensions open
                    edited = self._constraint(edited, edited.invars[0], edited.outvars[0])
                equations.append(edited)
            elif is_backward:
                equations += self._constrain_operands(edited)
            else:
                equations += self._constrain_results(edited)
        return jaxpr.replace(eqns=equations)

    def _constrain_results(self, equation: Any) -> Iterator[Any]:
        """Yields an equation of the forward pass, and then constraints on its results."""
        outvars, added = list(equation.outvars), []
        for number, variable in enumerate(outvars):
            if self._is_for(variable):
                added.append(self._constraint(equation, None, variable))
                outvars[number] = added[-1].invars[0]
        self.count += len(added)
        yield equation.replace(outvars=outvars) if added else equation
        yield from added

    def _constrain_operands(self, equation: Any) -> Iterator[Any]:
        """Yields constraints on the operands of an equation of the backward pass, and then it."""
        invars = list(equation.invars)
        for number, variable in enumerate(invars):
            is_literal = hasattr(variable, 'val')
            if not is_literal and self._is_for(variable):
                constraint = self._constraint(equation, variable, None)
                invars[number] = constraint.outvars[0]
                yield constraint
        yield equation.replace(invars=invars)

    def _is_for(self, variable: Any) -> bool:
        shape = tuple(getattr(variable.aval, 'shape', ()))
        if isinstance(self._change, ConstraintRemoval):
            return True
        return shape in (self._change.shape, *self._change.shapes)

    def _constraint(self, equation: Any, operand: Any, result: Any) -> Any:
        """A constraint at the line of an equation; None for a variable makes a new one."""
        aval = (result if operand is None else operand).aval
        if isinstance(self._change, ConstraintRemoval):
            spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(aval.shape))
        else:
            spec = PartitionSpec(*(from_tuple(axes) for axes in self._change.layout))
        sharding = NamedSharding(self._mesh, spec)
        abstract = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        constrained = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
            abstract
        )
        (made,) = constrained.jaxpr.eqns
        return made.replace(
            invars=made.invars if operand is None else [operand],
            outvars=made.outvars if result is None else [result],
            source_info=equation.source_info,
        )


def edit_splits(jaxpr: Any, change: SplitChange) -> Any:
    """Returns a ClosedJaxpr whose reshapes split and merge in another order.

    For a split of 512 features into 64 elements of 8 heads, with the heads first, and for merges of
    the same parts in the forward and in the backward pass:

        b = reshape[(4, 64, 8)] a    ->  t = reshape[(4, 8, 64)] a;  b = transpose[(0, 2, 1)] t
        d = reshape[(4, 512)] c      ->  t = transpose[(0, 2, 1)] c;  d = reshape[(4, 512)] t

    Args:
      jaxpr: the ClosedJaxpr.
      change: the reshapes and the order of their parts.

    Raises:
      ValueError: if it has none of the reshapes.
    """
    editor = _SplitEditor(change)
    edited = jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr))
    if not editor.count:
        raise ValueError(f'no reshape of {change.source} matches "{change}"')
    return edited


class _SplitEditor:
    def __init__(self, change: SplitChange):
        self._splits = {(before, after): order for before, after, order in change.splits}
        self.count = 0

    def edit(self, jaxpr: Any) -> Any:
        equations: list[Any] = []
        for equation in jaxpr.eqns:
            if bodies_of(equation):
                equations.append(with_bodies(equation, self.edit))
            else:
                equations += self._reorder(equation)
        return jaxpr.replace(eqns=equations)

    def _reorder(self, equation: Any) -> list[Any]:
        """The equations in place of one: a reshape and a move of its parts, or itself."""
        if equation.primitive.name != 'reshape' or equation.params.get('dimensions') is not None:
            return [equation]
        given, made = equation.invars[0].aval, equation.outvars[0].aval
        split = self._splits.get((tuple(given.shape), tuple(made.shape)))
        merged = self._splits.get((tuple(made.shape), tuple(given.shape)))
        if split is not None:
            new = tuple(made.shape[d] for d in split)
            back = tuple(int(d) for d in np.argsort(split))
            written = jax.make_jaxpr(lambda x: x.reshape(new).transpose(back))
        elif merged is not None:
            written = jax.make_jaxpr(lambda x: x.transpose(merged).reshape(made.shape))
        else:
            return [equation]
        self.count += 1
        found = written(jax.ShapeDtypeStruct(given.shape, given.dtype)).jaxpr.eqns
        info = {'source_info': equation.source_info}
        first = found[0].replace(invars=[equation.invars[0]], **info)
        last = found[-1].replace(outvars=list(equation.outvars), **info)
        return [first, last]
