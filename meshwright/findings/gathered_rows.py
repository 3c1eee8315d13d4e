"""The check of constraints that make all devices compute the same rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from meshwright.causes.cause import over
from meshwright.findings.forward_layouts import DENSE_PRODUCTS
from meshwright.findings.product_checks import LEAST, in_place_of, paths
from meshwright.findings.program_facts import ProgramFacts
from meshwright.findings.wording import axes_str, type_str
from meshwright.jaxpr.primitives import CONSTRAINTS, ELEMENTWISE, MOVES, PAIRWISE
from meshwright.jaxpr.values import Axes, Step, Value, readers_of
from partitioning.plan.findings import Finding

_AFTER = 64  # values after a constraint that are looked at
_FOLLOWED = ELEMENTWISE | MOVES | PAIRWISE | CONSTRAINTS | {'broadcast_in_dim'}


def find_gathered_rows(facts: ProgramFacts) -> Iterator[Finding]:
    """Constraints that make an activation whole along an axis that divided its rows.

    A sequence may be gathered for attention and scattered after it, which is no fault. Nor is a
    gather of all rows with which each device does something else: it compares its own rows with all
    of them, or looks them up in its columns of a table.
    """
    batch = sum(map(facts.shard_bytes, facts.batch))
    weights = paths(facts, facts.weights)
    readers = readers_of(step for step in facts.steps if not step.place.is_backward)
    seen = set[str]()
    for step in facts.steps:
        if step.name != 'sharding_constraint' or step.is_border or step.place.is_backward:
            continue
        given, made = step.inputs[0], step.outputs[0]
        if given.argument in weights or given.gradient_of or given.update_of:
            continue
        before = {a: d for d, own in enumerate(given.axes) for a in own or ()}
        after = {a for own in made.axes for a in own or ()}
        line = step.line
        lost = [
            axis
            for axis in before
            if axis not in after and axis in facts.first_axes
            if not _meets_parts(made, axis, readers, weights)
        ]
        if not lost or line in seen or made.shard_bytes(facts.sizes) < max(LEAST, batch // 8):
            continue
        seen.add(line)
        kept = [
            _in_order((*(a for a in lost if before[a] == d), *(own or ())), given.axes[d] or ())
            for d, own in enumerate(made.axes)
        ]
        yield Finding(
            'warning',
            'gathered rows',
            line,
            f'this constraint makes {type_str(made)} whole along {over(lost)}, which '
            f'{"divides" if len(lost) == 1 else "divide"} the batch: each device gets '
            f'{in_place_of(facts, made, given)}, and computes the same; write {axes_str(kept)}',
        )


def _meets_parts(
    value: Value, axis: str, readers: Mapping[int, Sequence[Step]], weights: Collection[str]
) -> bool:
    """Whether a product or a lookup combines a value with what the axis divides among devices.

    A parameter does not count in products: where its axis shards the batch, it is gathered.
    """
    pending, seen = [value], set[int]()
    while pending and len(seen) < _AFTER:
        current = pending.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        for step in readers.get(id(current), ()):
            others = [other for other in step.inputs if other is not current]
            if step.name in DENSE_PRODUCTS:
                others = [other for other in others if other.argument not in weights]
            if step.name in DENSE_PRODUCTS or step.name == 'gather':
                if any(axis in (own or ()) for other in others for own in other.axes):
                    return True
            elif step.name in _FOLLOWED:
                pending += step.outputs
    return False


def _in_order(axes: Axes, before: Axes) -> Axes:
    """Mesh axes in the order in which a dimension had them, new ones last."""
    return tuple(
        sorted(axes, key=lambda axis: before.index(axis) if axis in before else len(before))
    )
