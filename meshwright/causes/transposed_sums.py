"""Sums over devices that nobody has written: jax makes them when it differentiates a shard_map.

    mlp = jax.shard_map(f, in_specs=(P('data'), P(None, 'model')), out_specs=P('data'), ...)
    jax.grad(lambda x, w: mlp(x, w).sum())

All devices along 'model' get the same x, because its spec does not use 'model', and each multiplies
it with other columns of w. So each has a part of the gradient of x, and jax sums the parts. With
`check_vma=False`, jax does so for every argument, and also transposes each psum to a psum.
"""

from __future__ import annotations

from typing import Any

from meshwright.causes.cause import over, what_is
from meshwright.causes.evidence import Evidence
from meshwright.causes.value_graph import ValueGraph
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.mapped_dimensions import line_of_shard_map, shard_maps_around
from meshwright.jaxpr.primitives import PSUMS, names_in
from meshwright.jaxpr.values import Axes, Place, Step, Value, is_backward
from meshwright.jaxpr.writing_out import spec_axes
from partitioning.products.flops import open_jaxpr

UNCHECKED = 'with check_vma=False'  # jax then does not know which arrays are equal
_AGAIN = 'rematted_computation'  # what the program asks for in its forward pass
_SCATTERS = names_in('reduce_scatter psum_scatter')


def explain_transposed(evidence: Evidence, graph: ValueGraph) -> str:
    """Says why jax sums an array in a backward pass; '' if the program itself asks for the sum.

    Args:
      evidence: what the exchange moves.
      graph: the values of the function.
    """
    value = evidence.value
    if value is None or not is_backward(evidence.path) or _AGAIN in evidence.path:
        return ''
    operation = evidence.path.rpartition('/')[2]
    if operation in _SCATTERS:
        return (
            f"jax's transpose of an all_gather sums {what_is(value)} over {over(evidence.axes)}, "
            'and gives each device its part'
        )
    if operation not in PSUMS:
        return ''
    made = _sum_of(value, evidence.axes, graph)
    step = made.maker if made is not None else None
    place = next(iter(shard_maps_around((step or value.maker or value).place)), None)
    if place is None:
        return ''
    axes, line = over(evidence.axes), line_of_shard_map(place)
    returned = None if step is None else _returned(step, evidence.axes, place)
    if returned is not None:
        what = what_is(value)
        if not (value.gradient_of or value.argument):
            what = f'the gradient of its argument of shape {returned}'
        return (
            f"jax's transpose of the shard_map at {line} sums {what} over {axes}, because the "
            f'in_spec of the argument does not use {axes}, and each device has a part of it'
        )
    if step is None or step.name == 'psum_invariant':
        return (
            f"jax's transpose of the shard_map at {line} sums {what_is(value)} over {axes}, "
            f'because its array is the same on all devices along {axes} and is used there with '
            'arrays that differ, so that each device has a part of it'
        )
    at = f' at {made.line}' if made is not None and made.line else ''
    return (
        f"jax's transpose of the psum{at} sums {what_is(value)} over {axes}: {UNCHECKED}, jax "
        'transposes each psum to a psum, even if all devices have the same'
    )


def _sum_of(value: Value, axes: Axes, graph: ValueGraph) -> Value | None:
    """The sum over some mesh axes that takes a value, or makes it, or one that takes its like."""
    for one in (*graph.users(value), value):
        if one.maker is not None and one.primitive in PSUMS and _is_over(one.maker, axes):
            return one
    alike = [
        one
        for one in graph.values
        if one.primitive in PSUMS and one.backward and one.shape == value.shape and one.operands
        if one.maker is not None and _is_over(one.maker, axes)
    ]
    # The compiler may have moved the operation before the sum.
    return min(alike, key=lambda one: one.operands[0].line != value.line, default=None)


def _is_over(step: Step, axes: Axes) -> bool:
    return {*axes} <= {*exchange_axes(step)}


def _returned(step: Step, axes: Axes, place: Place) -> tuple[int, ...] | None:
    """The shape of the result of a shard_map that a sum makes, whose spec lacks the axes."""
    equation: Any = step.place.equation
    mapped: Any = place.equation
    inner, _ = open_jaxpr(mapped.params['jaxpr'])
    number = step.params.get('number', 0)
    if number >= len(equation.outvars):
        return None
    for n, variable in enumerate(inner.outvars):
        if variable is not equation.outvars[number]:
            continue
        aval = mapped.outvars[n].aval
        spec = spec_axes(
            mapped.params['out_specs'][n], len(aval.shape), dict(mapped.params['mesh'].shape)
        )
        if not {*axes} & {axis for own in spec for axis in own or ()}:
            return tuple(aval.shape)
    return None
