"""Goes through a traced function to find its values.

Names travel with the dimensions of the arguments through the operations of a jaxpr, so that an
activation, too, has logical axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.causes.jaxpr_bodies import (
    bodies_run_by,
    num_of_other_rank,
    shape_of,
    words_of,
)
from meshwright.causes.linked_dimensions import LinkedDimensions, link_operands
from meshwright.causes.moved_dimensions import Dim, Dims, better, contracted_dims, result_dims
from meshwright.causes.value_copies import first_of, merge, of_shape
from meshwright.causes.values import MOVES, TracedValues, Value
from meshwright.jaxpr.primitives import PAIRWISE
from meshwright.user_lines import stack_of_traceback
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

# Operations on several arrays of one shape, element by element.
_ARITHMETIC = frozenset(
    [
        'add',
        'add_any',
        'sub',
        'mul',
        'div',
        'max',
        'min',
        'select_n',
        'pow',
        'square',
        'sqrt',
        'neg',
        'integer_pow',
        'abs',
        'sign',
        'rsqrt',
        'clamp',
    ]
)


def trace_values(
    jaxpr: Any, rows: Sequence[PlanRow | None], names_of: Mapping[Any, str]
) -> TracedValues:
    """Finds the values of a traced function.

    Args:
      jaxpr: its ClosedJaxpr.
      rows: the layout of each argument, or None where it is not known.
      names_of: the logical axis of dimensions that have mesh axes and no name, by these axes.
    """
    arguments = [
        _argument(variable.aval, row, names_of)
        for variable, row in zip(
            jaxpr.jaxpr.invars, [*rows, *[None] * len(jaxpr.jaxpr.invars)], strict=False
        )
    ]
    inputs = frozenset(row.path for row in rows if row is not None and row.role == 'other')
    walk = _Walk(names_of, inputs)
    results = walk.run(jaxpr.jaxpr, arguments, _Place())
    return TracedValues(tuple(arguments), tuple(walk.values), tuple(results), walk.links)


def _argument(aval: Any, row: PlanRow | None, names_of: Mapping[Any, str]) -> Value:
    shape = tuple(getattr(aval, 'shape', ()))
    dims: Dims = (None,) * len(shape)
    if row is not None and len(row.dimensions) == len(shape):
        dims = tuple(
            Dim(
                d.name if isinstance(d.name, str) else _name_of(d.mesh_axes, row, names_of),
                sharding_axes(d.mesh_axes),
                row.path,
                number,
            )
            for number, d in enumerate(row.dimensions)
        )
    return Value(shape, str(getattr(aval, 'dtype', '')), dims, argument=row.path if row else '')


def _name_of(axes: Any, row: PlanRow, names_of: Mapping[Any, str]) -> str | None:
    """The name of a dimension of the batch, which has mesh axes only."""
    return names_of.get(sharding_axes(axes)) if row.role == 'other' else None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where operations are.

    Attributes:
      scope: the words of the name scopes around them.
      backward: whether they belong to a backward pass.
      stack: the 'file:line' of the code, and of its callers.
    """

    scope: frozenset[str] = frozenset()
    backward: bool = False
    stack: tuple[str, ...] = ()

    def of(self, equation: Any) -> _Place:
        """The place of an operation of a jaxpr that is here."""
        names = str(equation.source_info.name_stack)
        return _Place(
            self.scope | words_of(names),
            self.backward or 'transpose(' in names,
            stack_of_traceback(equation.source_info.traceback) or self.stack,
        )


class _Walk:
    """Goes through a jaxpr in the order of its operations."""

    def __init__(self, names_of: Mapping[Any, str], inputs: frozenset[str]):
        self.values: list[Value] = []
        self._names_of, self._inputs = names_of, inputs
        self.links = LinkedDimensions()
        # The parameters that forward operations take, by stack and by sizes of the dimensions.
        self._taken: dict[tuple[Any, ...], list[Value]] = {}

    def run(self, jaxpr: Any, arguments: Sequence[Value], around: _Place) -> list[Value]:
        """Returns the results of a jaxpr, and keeps the values of all its operations."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Value:
            if hasattr(atom, 'val') or atom not in known:  # a literal or a constant
                shape = shape_of(atom)
                return Value(shape, str(getattr(atom.aval, 'dtype', '')), (None,) * len(shape))
            return known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            place = around.of(equation)
            if not place.backward:
                link_operands(self.links, equation, operands)
            results = self._apply(equation, operands, place)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Any, operands: list[Value], place: _Place) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == 'scan':
            return self._scan(equation, operands, place)
        for body, given, stays in bodies_run_by(equation, operands):
            words, first = place.scope | {str(params.get('name', ''))}, len(self.values)
            # Inside of a shard_map, shapes are those of one shard.
            inside = [of_shape(g, shape_of(v)) for g, v in zip(given, body.invars, strict=True)]
            results = self.run(body, inside, dataclasses.replace(place, scope=words))
            if name == 'shard_map':
                for value in self.values[first:]:
                    value.local = True
            if stays:
                pairs = zip(results, equation.outvars, strict=True)
                return [of_shape(r, shape_of(v)) for r, v in pairs]
        results = []
        for number, variable in enumerate(equation.outvars):
            shape = shape_of(variable)
            taken = [operands[number]] if name in PAIRWISE else operands
            value = Value(
                shape,
                str(getattr(variable.aval, 'dtype', '')),
                result_dims(equation, taken, shape),
                primitive=name,
                stack=place.stack,
                scope=place.scope,
                backward=place.backward,
                operands=tuple(taken),
                contracted=contracted_dims(equation, taken),
            )
            self._inherit(value, equation)
            results.append(value)
        self.values += results
        return results

    def _scan(self, equation: Any, operands: list[Value], place: _Place) -> list[Value]:
        inner = equation.params['jaxpr']
        body = getattr(inner, 'jaxpr', inner)
        # What is scanned or stacked has one dimension more outside than inside.
        num_scanned = num_of_other_rank(equation.invars, body.invars)
        num_carry = len(body.outvars) - num_of_other_rank(equation.outvars, body.outvars)
        num_consts = len(operands) - num_carry - num_scanned
        scanned = [first_of(x) for x in operands[num_consts + num_carry :]]
        carry = operands[num_consts : num_consts + num_carry]
        leading = next((x.dims[0] for x in operands[num_consts + num_carry :] if x.dims), None)
        kept = len(self.values)
        given = carry
        for _ in range(2):  # what the body learns about its carry holds for its next iteration
            del self.values[kept:]
            inside = [*operands[:num_consts], *carry, *scanned]
            results = self.run(body, inside, place)
            for one, first, last in zip(carry, given, results, strict=False):
                if one is not first:
                    one.copied_from = (first, last)
            carry = [merge(a, b) for a, b in zip(carry, results, strict=False)]
        stacked = [
            dataclasses.replace(
                value,
                shape=tuple(variable.aval.shape),
                dims=(leading, *value.dims),
                layout=None if value.layout is None else ((), *value.layout),
                operands=(value,),
                primitive='scan',
                stack=value.stack or place.stack,
                backward=place.backward,
                loop=place.stack,
                copied_from=(),
            )
            for value, variable in zip(
                results[num_carry:], equation.outvars[num_carry:], strict=True
            )
        ]
        self.values += stacked
        return [*results[:num_carry], *stacked]

    def _inherit(self, value: Value, equation: Any) -> None:
        """Notes what a value is, from what its operands are, and its layout if that is fixed."""
        first, name = (value.operands or (None,))[0], value.primitive
        if first is not None and name in MOVES:
            value.argument, value.gradient_of = first.argument, first.gradient_of
            value.update_of = first.update_of
        elif name in _ARITHMETIC:
            equal = [x for x in value.operands if x.size == value.size]
            kept = [x.gradient_of or x.update_of or x.argument for x in equal]
            changed = next((x.gradient_of or x.update_of for x in equal), '')
            if kept and not changed and not value.backward and value.shape and all(kept):
                changed = kept[0]
            if name == 'add_any' and value.backward:
                value.gradient_of = changed
            else:
                value.update_of = changed
        if not value.backward:
            for operand in value.operands:
                if operand.argument and operand.argument not in self._inputs:
                    key = value.stack, tuple(sorted(operand.shape))
                    self._taken.setdefault(key, []).append(operand)
        elif not value.gradient_of and name not in (*MOVES, 'broadcast_in_dim', 'select_n'):
            self._adopt(value)
        if name in ('sharding_constraint', 'reshard'):
            sharding = equation.params.get('sharding', equation.params.get('dst_sharding'))
            spec = getattr(sharding, 'spec', None)
            if spec is not None:
                entries = [*spec, *[None] * (len(value.shape) - len(spec))]
                value.layout = tuple(sharding_axes(entry) for entry in entries)
                if not value.backward:
                    self.links.constrain(value.dims, value.layout)
                value.dims = self._named(value.dims, value.layout)

    def _adopt(self, value: Value) -> None:
        """Notes of which parameter a value is the gradient, if it is one."""
        parameter = self._find_parameter(value)
        if parameter is None:
            return
        value.gradient_of = parameter.argument
        # Where two dimensions have the same size, their order is not known.
        if len(set(value.shape)) == len(value.shape):
            theirs = [parameter.dims[parameter.shape.index(n)] for n in value.shape]
            pairs = zip(value.dims, theirs, strict=True)
            value.dims = tuple(better(mine, other) for mine, other in pairs)

    def _find_parameter(self, value: Value) -> Value | None:
        """The parameter that a value of a backward pass is the gradient of.

        The backward operation of a line has the stack of the forward one, and the gradient of a
        parameter has its shape, up to the order of dimensions.
        """
        found = self._taken.get((value.stack, tuple(sorted(value.shape))), ())
        near = [x for x in found if value.scope >= x.scope] or found
        return near[0] if near else None

    def _named(self, dims: Dims, layout: Sequence[tuple[str, ...]]) -> Dims:
        """Names dimensions that a constraint shards and that have no name yet."""
        used = {d.name for d in dims if d}
        named = []
        for dim, axes in zip(dims, layout, strict=True):
            name = self._names_of.get(axes)
            if axes and (dim is None or dim.name is None) and name not in used:
                dim = Dim(name, axes, dim.argument if dim else '', dim.number if dim else 0)
            named.append(dim)
        return tuple(named)
