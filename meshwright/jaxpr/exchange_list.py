"""Lists the exchanges of a traced function, in the form that compiled programs list theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.memory_estimate import array_name
from meshwright.jaxpr.tracing import TracedProgram
from meshwright.jaxpr.values import Axes, Block, Step
from meshwright.program.collectives import RING_SHARES, Collective


def list_collectives(traced: TracedProgram) -> tuple[Collective, ...]:
    """Lists the exchanges of a traced function, in the order in which they run.

    An exchange along axes that span slices is two: one within each slice, and one between slices
    of what is left after the first, or before it.
    """
    return tuple(
        one
        for step, axes, times in walk_exchanges(traced)
        for one in exchanges_of(step, axes, traced, times)
    )


def walk_exchanges(traced: TracedProgram) -> Iterator[tuple[Step, Axes, int]]:
    """Yields the steps that exchange data, with their mesh axes and how often they run."""
    yield from _in_block(traced.block, traced, 1)


def _in_block(block: Block, traced: TracedProgram, times: int) -> Iterator[tuple[Step, Axes, int]]:
    for step in block.steps:
        for body in step.bodies:
            yield from _in_block(body, traced, times * step.times)
        if step.name not in KINDS:
            continue
        axes = tuple(axis for axis in traced.axis_sizes if axis in exchange_axes(step))
        if math.prod(traced.axis_sizes[axis] for axis in axes) > 1:
            yield step, axes, times


def exchanges_of(step: Step, axes: Axes, traced: TracedProgram, times: int) -> Iterator[Collective]:
    """The exchanges of a step: one within each slice, and one between slices."""
    kind, given = KINDS[step.name], step.inputs[0]
    # The network, the number of devices or slices in a group, and the operand there, as a multiple
    # of the operand of the whole exchange.
    shares: list[tuple[str, int, float]]
    nbytes = given.shard_bytes(traced.axis_sizes)
    places: tuple[int, ...] = ()
    if groups := step.params.get('axis_index_groups'):  # a part of an axis
        shares, places = [('ici', len(groups[0]), 1.0)], tuple(groups[0])
    else:
        between = math.prod(traced.slices.get(axis, 1) for axis in axes)
        within = math.prod(traced.axis_sizes[axis] for axis in axes) // between
        # What each device has inside of its slice: before the other slices are reached, or after.
        inside = 'ici', within, between if kind == 'all-gather' else 1
        scattered = kind in ('all-reduce', 'reduce-scatter')
        outside = 'dcn', between, 1 / within if scattered else 1
        shares = [share for share in (inside, outside) if share[1] > 1]
    for network, size, share in shares:
        yield Collective(
            kind=kind,
            network=network,
            axes=axes if network == 'ici' else tuple(a for a in axes if a in traced.slices),
            group_size=size,
            arrays=(array_name(given, traced.axis_sizes),),
            wire_bytes=RING_SHARES[kind](size) * nbytes * share,
            count=times,
            op_name=step.op_name,
            source=step.line,
            asynchronous=None,  # only a compiler decides it
            places=places,
        )
