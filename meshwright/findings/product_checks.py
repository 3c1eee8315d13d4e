"""Checks of the lines of a function: its products, its constraints, and what runs on the host."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from meshwright.advice.of_arrays import uneven_constraints
from meshwright.causes.cause import over
from meshwright.causes.row_axes import ROW_AXES
from meshwright.findings.forward_layouts import DENSE_PRODUCTS
from meshwright.findings.program_facts import ProgramFacts, axes_lost, free_dimension
from meshwright.findings.wording import axes_str, type_str
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.primitives import CONSTRAINTS, MOVES
from meshwright.jaxpr.values import Step, Value
from partitioning.amounts import bytes_str, bytes_strs
from partitioning.plan.findings import Finding
from partitioning.rules import describe_axes

_CALLBACKS = {
    'pure_callback': 'jax.pure_callback',
    'io_callback': 'io_callback',
    'debug_callback': 'jax.debug.print or jax.debug.callback',
    'debug_print': 'jax.debug.print',
    'infeed': 'infeed',
    'outfeed': 'outfeed',
}
_BEFORE = 24  # values before a product that are looked at
LEAST = 4096  # bytes of a parameter, or of an activation


def find_cut_products(facts: ProgramFacts) -> Iterator[Finding]:
    """Products that sum over a sharded dimension of a parameter, whose other operand is whole.

    Each device then uses a part of what it has, and the parts of the result are summed. If the same
    axis sharded another dimension of the parameter, nothing would be sent. Where the axis shards
    the batch, the parameter is gathered, as FSDP intends.
    """
    seen, lines = set[tuple[str, str]](), set[str]()
    found: dict[tuple[str, str, str], list[tuple[Step, int, int]]] = collections.defaultdict(list)
    for step, number, d, axis in split_sums(facts):
        weight, other = step.inputs[number], step.inputs[1 - number]
        if weight.nbytes < LEAST or (weight.argument, axis) in seen:
            continue
        if is_meant(facts, other, axis):
            continue
        seen.add((weight.argument, axis))
        if border_before(facts, other, axis) is not None:
            continue  # see `shard_map_checks`
        constraint = _constraint_before(other, axis)
        if constraint is None:
            found[step.line, axis, axes_str(weight.axes)].append((step, number, d))
        elif constraint.line not in lines:
            lines.add(constraint.line)
            yield _describe_gathered(facts, axis, constraint, step, weight)
    for (line, axis, _), group in found.items():
        yield Finding('warning', 'cut product', line, _describe_cut(facts, axis, group))


def split_sums(facts: ProgramFacts) -> Iterator[tuple[Step, int, int, str]]:
    """The products of the forward pass that sum over a sharded dimension of a parameter.

    Yields:
      The product, the number of the parameter among its operands, the number of the dimension, and
      the mesh axis.
    """
    weights = paths(facts, facts.weights)
    for step in facts.steps:
        if step.name not in DENSE_PRODUCTS or step.place.is_backward:
            continue
        factors = find_factors(step)
        for number, weight in enumerate(step.inputs[:2]):
            if weight.argument not in weights or step.inputs[1 - number].argument in weights:
                continue
            for d, dim in enumerate(factors.inputs[number]):
                for axis in (weight.axes[d] or ()) if {*dim} & factors.summed else ():
                    yield step, number, d, axis


def _values_before(value: Value, *, moved: bool = False) -> Iterator[Value]:
    """A value and the values of its shape that it is made from, the near ones first.

    Args:
      value: the value.
      moved: whether values that are moved into its shape count, too.
    """
    pending, seen = [value], set[int]()
    while pending and len(seen) < _BEFORE:
        current = pending.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        is_moved = moved and current.primitive in MOVES
        pending += [
            one
            for one in current.operands
            if one.shape == current.shape or (is_moved and one.size == current.size)
        ]


def _constraint_before(value: Value, axis: str) -> Step | None:
    """The constraint that makes an operand whole along a mesh axis which divided it, if any."""
    for near in _values_before(value):
        step = near.maker
        is_constraint = step is not None and step.name == 'sharding_constraint'
        if step is not None and is_constraint and not step.is_border and axis in axes_lost(step):
            return step
    return None


def border_before(facts: ProgramFacts, value: Value, axis: str) -> Step | None:
    """The end of the shard_map whose out_specs make an operand whole along a mesh axis, if any.

    The operand may be its result in another shape, such as with the features of all heads.
    """
    borders = (facts.borders.get(id(near)) for near in _values_before(value, moved=True))
    return next((b for b in borders if b is not None and axis in b.params['axes']), None)


def _describe_gathered(
    facts: ProgramFacts, axis: str, constraint: Step, product: Step, weight: Value
) -> Finding:
    given, made = constraint.inputs[0], constraint.outputs[0]
    d = next(d for d, own in enumerate(given.axes) if axis in (own or ()))
    kept = [(*(own or ()), axis) if n == d else own or () for n, own in enumerate(made.axes)]
    return Finding(
        'warning',
        'gathered activation',
        constraint.line,
        f'this constraint makes {type_str(made)} whole along {axis!r}, and the product at '
        f'{product.line} sums over a dimension of {weight.argument} that is sharded along it: '
        f'each device gets {in_place_of(facts, made, given)}, and uses a part of it; write '
        f'{axes_str(kept)}',
    )


def in_place_of(facts: ProgramFacts, made: Value, given: Value) -> str:
    texts = bytes_strs(*(value.shard_bytes(facts.sizes) for value in (made, given)))
    return ' in place of '.join(texts)


def is_meant(facts: ProgramFacts, other: Value, axis: str) -> bool:
    """Whether the axis shards the batch, or is, or may be, an axis of the other operand."""
    if axis in facts.row_axes or axis in ROW_AXES or axis not in facts.sizes:
        return True
    if axis in other.manual:
        return True
    return any(facts.layouts.may_have(other, e, axis) for e in range(len(other.shape)))


def _describe_cut(facts: ProgramFacts, axis: str, group: Sequence[tuple[Step, int, int]]) -> str:
    (step, number, d), size = group[0], facts.sizes[axis]
    weight, factors = step.inputs[number], find_factors(step)
    made = sum(one.outputs[0].shard_bytes(facts.sizes) for one, *_ in group)
    axes = [tuple(a for a in own or () if a != axis) for own in weight.axes]
    kept = [
        n
        for n, dim in enumerate(factors.inputs[number])
        if not set(dim) & factors.summed
        and free_dimension(weight.shape[n : n + 1], axes[n : n + 1], axis, facts.sizes) is not None
    ]
    order = _dimensions_of_argument(weight)
    now = [weight.axes[n] for n in order]
    advice = f'leave {axis!r} out of its layout'
    if kept:
        moved = [(*axes[n], axis) if n == kept[0] else axes[n] for n in order]
        advice = f'write {axes_str(moved)} for it'
    products = 'this product sums' if len(group) == 1 else f'{len(group)} products sum'
    like = f' (and {len(group) - 1} more like it)' if len(group) > 1 else ''
    return (
        f'{products} over dimension {order.index(d)} of {weight.argument}{like}, which has '
        f'{weight.shape[d]:,} elements and is sharded along {axis!r} by {axes_str(now)}, '
        f'while the other operand is whole along it: the {size} devices along {axis!r} must sum up '
        f'their results, or gather the parameter ({bytes_str(2 * (size - 1) / size * made)} from '
        f'each device); {advice}'
    )


def _dimensions_of_argument(weight: Value) -> list[int]:
    """The dimensions of an operand in the order of the argument that it is, such as transposed."""
    numbers = [dim.number if dim is not None else -1 for dim in weight.dims]
    every = list(range(len(weight.shape)))
    return sorted(every, key=numbers.__getitem__) if sorted(numbers) == every else every


def find_indivisible_constraints(facts: ProgramFacts) -> Iterator[Finding]:
    """Constraints on dimensions that the devices along their axes do not divide."""
    seen = set[tuple[str, int]]()
    own = (step for step in facts.steps if step.name in CONSTRAINTS and not step.is_border)
    made = (value for step in own for value in step.outputs)
    for value, d, axes, shards in uneven_constraints(made, facts.sizes):
        assert value.maker is not None
        n, key = value.shape[d], (value.maker.line, d)
        if key in seen:
            continue
        seen.add(key)
        part = -(-n // shards)
        full, rest = n // part, n % part
        last = f', one has {rest:,}' if rest else ''
        empty = shards - full - bool(rest)
        none = f' and {empty} {"has" if empty == 1 else "have"} none' if empty else ''
        counts = describe_axes({a: facts.sizes[a] for a in axes if a in facts.sizes})
        yield Finding(
            'warning',
            'indivisible',
            key[0],
            f'dimension {d} of {type_str(value)} has {n:,} elements, which {shards} devices '
            f'({counts}) do not divide: jax pads or replicates it silently ({full:,} of {shards} '
            f'devices have {part:,}{last}{none}); make it {part * shards:,}, or leave '
            f'{over(axes)} out of the constraint',
        )


def find_host_work(facts: ProgramFacts) -> Iterator[Finding]:
    """Callbacks to Python, and copies to the memory of the host, inside of the function."""
    seen = set[tuple[str, str]]()
    host = {facts.path(i) for i, v in enumerate(facts.block.inputs) if v.on_host}
    for step in facts.steps:
        key = step.name, step.line
        if key in seen:
            continue
        if step.name in _CALLBACKS:
            seen.add(key)
            yield Finding(
                'warning',
                'callback',
                key[1],
                f'{_CALLBACKS[step.name]} calls Python in every execution, for which the devices '
                'wait; return the value, and use it outside of the function',
            )
        elif step.name == 'device_put' and not host:
            moved = [
                (a, b)
                for a, b in zip(step.inputs, step.outputs, strict=True)
                if b.on_host and not a.on_host and a.nbytes >= LEAST
            ]
            if moved and not any(v.on_host for v in facts.block.outputs):
                seen.add(key)
                nbytes = sum(a.shard_bytes(facts.sizes) for a, _ in moved)
                yield Finding(
                    'warning',
                    'transfer',
                    key[1],
                    f'{bytes_str(nbytes)} are copied to the memory of the host in every execution, '
                    'and no argument or result is there; leave it on the device',
                )


def paths(facts: ProgramFacts, numbers: Sequence[int]) -> set[str]:
    return {facts.path(i) for i in numbers}
