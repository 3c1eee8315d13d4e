"""Layers that are gathered before the first one is needed, and all stay in memory.

    layers = jax.lax.with_sharding_constraint(layers, whole)    # 4 layers are whole from here on
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)

A constraint on the weights of one layer, inside of the loop and of jax.checkpoint, holds one layer
at a time. Without jax.checkpoint, the backward pass keeps all of them in any case.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator

from meshwright.causes.cause import over
from meshwright.causes.row_axes import ROW_AXES
from meshwright.findings.forward_layouts import DENSE_PRODUCTS
from meshwright.findings.program_facts import ProgramFacts, axes_lost
from meshwright.jaxpr.primitives import MOVES
from meshwright.jaxpr.values import Axes, Step, Value, ties
from partitioning.amounts import bytes_str, bytes_strs
from partitioning.plan.findings import Finding

_SHARE = 0.05  # of the arguments of a device, for what is gathered to be much
_AGAIN = 'rematted_computation'  # in the path of what jax.checkpoint computes again


@dataclasses.dataclass(frozen=True)
class _Gather:
    """A constraint that makes a parameter whole.

    Attributes:
      step: the constraint.
      axes: the mesh axes along which it makes it whole.
      layers: the number of layers in the array.
      user: the loop over them.
    """

    step: Step
    axes: Axes
    layers: int
    user: Step


def find_gathered_layers(facts: ProgramFacts) -> Iterator[Finding]:
    """Constraints that make the weights of several layers whole before the first one is used."""
    by_line: dict[tuple[str, Axes], list[_Gather]] = collections.defaultdict(list)
    for one in _of_stacks(facts):
        by_line[one.step.line, one.axes].append(one)
    recomputed = set(_recomputed(facts))
    kept = any(step.place.is_backward for step in facts.steps)
    given = sum(map(facts.shard_bytes, range(len(facts.held))))
    for (line, axes), found in by_line.items():
        values = [one.step.outputs[0] for one in found]
        if kept and recomputed.isdisjoint(value.argument for value in values):
            continue
        held = sum(value.shard_bytes(facts.sizes) for value in values)
        layers = max(one.layers for one in found)
        if layers > 1 and held >= _SHARE * given:
            yield _describe(facts, line, axes, found, (held, layers))


def _describe(
    facts: ProgramFacts, line: str, axes: Axes, found: list[_Gather], size: tuple[int, int]
) -> Finding:
    held, layers = size
    first, user = found[0], found[0].user
    whole, one = bytes_strs(held, held / layers)
    more = f' and {len(found) - 1} more' if len(found) > 1 else ''
    checkpoint = more_sent = ''
    if any(_recomputed(facts)):
        n = math.prod(facts.sizes[axis] for axis in axes)
        checkpoint = ' and of jax.checkpoint'
        more_sent = f'; they are then gathered once more, and {bytes_str(held * (n - 1) / n)} sent'
    return Finding(
        'warning',
        'gathered layers',
        line,
        f'this constraint makes {first.step.inputs[0].argument}{more} whole along {over(axes)} '
        f'before the loop at {user.line}: each device holds all {layers} layers, {whole}, '
        f'where one layer is {one}; write the constraint on the weights of one layer, inside of '
        f'the loop{checkpoint}{more_sent}',
    )


def _recomputed(facts: ProgramFacts) -> Iterator[str]:
    """The parameters whose products are computed again in the backward pass."""
    for step in facts.steps:
        if step.name in DENSE_PRODUCTS and _AGAIN in step.place.path:
            yield from (value.argument for value in step.inputs if value.argument)


def _of_stacks(facts: ProgramFacts) -> Iterator[_Gather]:
    """Gathers of stacked layers over which a loop of the forward pass goes."""
    for step in facts.steps:
        for tie in ties(step) if step.bodies and not step.place.is_backward else ():
            if tie.stacked and not tie.output and (found := _gathered(tie.outer, facts)):
                yield _Gather(*found, tie.outer.shape[0], step)


def _gathered(value: Value, facts: ProgramFacts) -> tuple[Step, Axes] | None:
    """The constraint that makes a parameter whole along axes of the batch, and the axes, if any."""
    step = _origin(value).maker
    if step is None or step.name != 'sharding_constraint' or step.is_border:
        return None
    if step.inputs[0].argument not in {facts.path(i) for i in facts.weights}:
        return None
    lost = tuple(a for a in facts.sizes if a in axes_lost(step))
    of_rows = lost and all(a in facts.row_axes or a in ROW_AXES for a in lost)
    return (step, lost) if of_rows else None


def _origin(value: Value) -> Value:
    """The constraint that a value is a cast or a moved copy of, or the value itself."""
    while value.maker is not None and value.maker.name in MOVES and value.maker.inputs:
        if value.maker.name == 'sharding_constraint':
            return value
        value = value.maker.inputs[0]
    return value
