"""What devices exchange for a lookup in a table that is sharded along the axis of the indices.

XLA moves what is smaller on each device: it gathers the table, or each device looks up the rows of
all devices in its part of the table, and the devices sum and scatter what they have found. The
gradient of the table is made likewise. This was seen for tables that are arguments, such as the
embeddings of words; rows of activations, such as tokens on their way to experts, are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.jaxpr.factors import Dimension, Factors
from meshwright.jaxpr.primitives import MOVES, SCATTERS
from meshwright.jaxpr.values import Block, Step, Value, ties


def find_lookups(block: Block) -> frozenset[int]:
    """Returns the ids of the steps that look up in arguments, and that make their gradients."""
    arguments = {id(value) for value in block.inputs}
    lookups, scatters = list[Step](), list[Step]()

    def read(block: Block) -> None:
        for step in block.steps:
            if step.bodies:
                given = [tie for tie in ties(step) if not tie.output]
                arguments.update(id(tie.inner) for tie in given if id(tie.outer) in arguments)
                for body in step.bodies:
                    read(body)
            elif step.name in MOVES and id(step.inputs[0]) in arguments:
                arguments.update(map(id, step.outputs))
            elif step.name == 'gather' and id(step.inputs[0]) in arguments:
                lookups.append(step)
            elif step.name in SCATTERS:
                scatters.append(step)

    read(block)
    shapes = {step.inputs[0].shape for step in lookups}
    gradients = [s for s in scatters if s.inputs[0].shape in shapes and s.place.is_backward]
    return frozenset(id(step) for step in [*lookups, *gradients])


def choose_smaller(
    axis: str,
    votes: Mapping[str, Mapping[int, Sequence[Value]]],
    step: Step,
    factors: Factors,
    sizes: Mapping[str, int],
) -> int | None:
    """The factor of a lookup that an axis divides if the table and the rows both have the axis.

    Args:
      axis: the mesh axis.
      votes: for each mesh axis, the factors that it may divide, with the arrays that say so.
      step: the lookup, or the scatter of its gradient.
      factors: the factors of its arrays.
      sizes: the size of each mesh axis.

    Returns:
      The factor of the larger one of the two, which stays where it is; None if the axis divides
      anything else.
    """
    table = step.inputs[0], factors.inputs[0]
    rows = (step.outputs[0], factors.outputs[0])
    if step.name != 'gather':
        rows = step.inputs[2], factors.inputs[2]
    mine, theirs = ({f for dim in array for f in dim} for _, array in (table, rows))
    of_table = [f for f in votes[axis] if f in mine - theirs]
    of_rows = [f for f in votes[axis] if f in theirs - mine]
    if len(of_table) != 1 or len(of_rows) != 1 or len(votes[axis]) > 2:
        return None

    def nbytes(value: Value, array: Sequence[Dimension]) -> float:
        own = {f for dim in array for f in dim}
        shards = (sizes[a] for a, found in votes.items() if a != axis and own & found.keys())
        return value.nbytes / math.prod(shards)

    return of_table[0] if nbytes(*table) > nbytes(*rows) else of_rows[0]
