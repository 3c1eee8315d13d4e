"""Traced functions with a constraint more, less, or with another one, as if their code said so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.causes.changes import ConstraintChange, ConstraintRemoval
from meshwright.user_lines import stack_of_traceback, user_line
from partitioning.products.bodies import bodies_of
from partitioning.rules import from_tuple

_CONSTRAINTS = ('sharding_constraint', 'reshard')


def with_constraint(jaxpr: Any, change: ConstraintChange, mesh: Any) -> Any:
    """A ClosedJaxpr with a constraint on the value of a line, and on its gradient.

    Args:
      jaxpr: the ClosedJaxpr of a traced function.
      change: the constraint.
      mesh: the mesh.

    Raises:
      ValueError: if no operation of the function matches the change.
    """
    editor = _Editor(change, mesh)
    edited = jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr, backward=False, caller=()))
    if not editor.count:
        raise ValueError(f'no operation of {change.source} makes an array of shape {change.shape}')
    return edited


def without_constraint(jaxpr: Any, change: ConstraintRemoval, mesh: Any) -> Any:
    """A ClosedJaxpr without the constraints of a line.

    Args:
      jaxpr: the ClosedJaxpr of a traced function.
      change: the line.
      mesh: the mesh.

    Raises:
      ValueError: if the line has no constraint.
    """
    editor = _Editor(change, mesh)
    edited = jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr, backward=False, caller=()))
    if not editor.count:
        raise ValueError(f'{change.source} has no constraint')
    return edited


class _Editor:
    """Edits the equations of a jaxpr and of all jaxprs inside of it."""

    def __init__(self, change: ConstraintChange | ConstraintRemoval, mesh: Any):
        self._change, self._mesh = change, mesh
        self.count = 0

    def edit(self, jaxpr: Any, *, backward: bool, caller: tuple[str, ...]) -> Any:
        equations: list[Any] = []
        for equation in jaxpr.eqns:
            is_backward = backward or 'transpose(' in str(equation.source_info.name_stack)
            stack = stack_of_traceback(equation.source_info.traceback) or caller
            edited = self._inside(equation, is_backward, stack)
            if user_line(stack) != self._change.source:
                equations.append(edited)
            elif isinstance(self._change, ConstraintRemoval) or self._change.replaces:
                equations.append(self._replaced(edited))
            elif is_backward:
                equations += self._before(edited)
            else:
                equations += self._after(edited)
        return jaxpr.replace(eqns=equations)

    def _inside(self, equation: Any, backward: bool, stack: tuple[str, ...]) -> Any:
        """The equation, with its own jaxprs edited."""
        if not bodies_of(equation):
            return equation
        params = {
            name: self._edit_value(value, backward, stack)
            for name, value in equation.params.items()
        }
        return equation.replace(params=params)

    def _edit_value(self, value: Any, backward: bool, stack: tuple[str, ...]) -> Any:
        if isinstance(value, tuple | list):
            kind = type(value)
            if any(hasattr(x, 'eqns') for x in value):
                return kind(self._edit_value(x, backward, stack) for x in value)
            return value
        if not hasattr(value, 'eqns'):
            return value
        if hasattr(value, 'jaxpr') and value.jaxpr is not value:
            return value.replace(jaxpr=self.edit(value.jaxpr, backward=backward, caller=stack))
        return self.edit(value, backward=backward, caller=stack)

    def _replaced(self, equation: Any) -> Any:
        """The constraint of the change, or one that leaves all open, in place of another one."""
        if equation.primitive.name not in _CONSTRAINTS:
            return equation
        if not self._is_for(equation.outvars[0]):
            return equation
        self.count += 1
        ours = self._constraint(equation.outvars[0].aval)
        return ours.replace(
            invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
        )

    def _after(self, equation: Any) -> Iterator[Any]:
        """An equation of the forward pass, whose results are constrained."""
        outvars, added = list(equation.outvars), []
        for number, variable in enumerate(outvars):
            if self._is_for(variable):
                ours = self._constraint(variable.aval)
                outvars[number] = ours.invars[0]
                added.append(ours.replace(outvars=[variable], source_info=equation.source_info))
        self.count += len(added)
        yield equation.replace(outvars=outvars) if added else equation
        yield from added

    def _before(self, equation: Any) -> Iterator[Any]:
        """An equation of the backward pass, whose operands are constrained."""
        invars = list(equation.invars)
        for number, variable in enumerate(invars):
            if hasattr(variable, 'val'):
                continue
            if self._is_for(variable):
                ours = self._constraint(variable.aval)
                yield ours.replace(invars=[variable], source_info=equation.source_info)
                invars[number] = ours.outvars[0]
        yield equation.replace(invars=invars)

    def _is_for(self, variable: Any) -> bool:
        shape = tuple(getattr(variable.aval, 'shape', ()))
        return isinstance(self._change, ConstraintRemoval) or shape == self._change.shape

    def _constraint(self, aval: Any) -> Any:
        """The equation of a constraint, with new variables."""
        if isinstance(self._change, ConstraintRemoval):
            spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(aval.shape))
        else:
            spec = PartitionSpec(*(from_tuple(axes) for axes in self._change.layout))
        sharding = NamedSharding(self._mesh, spec)
        abstract = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        constrained = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
            abstract
        )
        return constrained.jaxpr.eqns[0]


def layouts_of(compiled: jax.stages.Compiled) -> Mapping[str, Any]:
    """The flat shardings of the arguments and results of a program, as `jax.jit` takes them."""
    # Arguments that the program does not use have None in place of a sharding.
    in_tree: Any = compiled.in_tree
    out_tree: Any = compiled.out_tree
    inputs = in_tree.flatten_up_to(compiled.input_shardings)
    outputs = out_tree.flatten_up_to(compiled.output_shardings)
    donated = [i for i, x in enumerate(jax.tree.leaves(compiled.args_info)) if x.donated]
    return {
        'in_shardings': tuple(inputs),
        'out_shardings': list(outputs),
        'donate_argnums': tuple(donated),
    }
