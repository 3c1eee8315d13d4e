"""Removes what a function adds to arrays that are 0 everywhere, as compilers do.

A loop that differentiates a part of the loss adds up gradients for all parameters, also for those
that the part does not use:

    acc = 0                              the loop adds 0 to 0: compilers do not carry it, and
    for each part: acc = acc + 0         the gradient is x
    gradient = x + acc
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwright.jaxpr.primitives import names_in
from meshwright.jaxpr.values import Block, Step, Value, loop_counts

_ADDS = names_in('add add_any')
# Of zeros, they make zeros.
_KEEPING = _ADDS | names_in(
    'broadcast_in_dim convert_element_type reshape transpose squeeze slice copy pvary pcast '
    'sharding_constraint'
)


def drop_zeros(block: Block) -> None:
    """Takes additions of zeros out of a block and its bodies, and zeros out of what loops carry."""
    _drop(block, set())


def _drop(block: Block, zeros: set[int]) -> None:
    """Rewrites a block; `zeros` has the ids of its values that are known to be 0."""
    same: dict[int, Value] = {}
    steps: list[Step] = []
    for step in block.steps:
        step.inputs = [same.get(id(value), value) for value in step.inputs]
        if step.name == 'scan':
            steps += _drop_of_loop(step, zeros)
            steps.append(step)
            continue
        for body in step.bodies:
            _drop(body, set())
        kept = _kept(step, zeros)
        if kept is not None:
            same[id(step.outputs[0])] = kept
            continue
        if _is_zero(step, zeros):
            zeros.add(id(step.outputs[0]))
        steps.append(step)
    block.steps = steps
    block.outputs = [same.get(id(value), value) for value in block.outputs]


def _kept(step: Step, zeros: set[int]) -> Value | None:
    """The operand that a step returns because it adds 0, or None."""
    if step.name not in _ADDS:
        return None
    (result,), others = step.outputs, [v for v in step.inputs if not _known(v, zeros)]
    alike = len(others) == 1 and others[0].shape == result.shape
    return others[0] if alike and others[0].dtype == result.dtype else None


def _is_zero(step: Step, zeros: set[int]) -> bool:
    return step.name in _KEEPING and all(_known(value, zeros) for value in step.inputs)


def _known(value: Value, zeros: set[int]) -> bool:
    if id(value) in zeros:
        return True
    return value.constant is not None and value.size == 1 and not np.any(value.constant)


def _drop_of_loop(step: Step, zeros: set[int]) -> list[Step]:
    """Rewrites a scan; returns the steps that make the zeros that it returned."""
    (body,), (consts, carry) = step.bodies, loop_counts(step)
    given = {i for i, value in enumerate(step.inputs) if _known(value, zeros)}
    while True:  # what is 0 at first and not after an iteration is not 0
        inside = {id(body.inputs[i]) for i in given}
        found = _find(body, set(inside))
        lost = {
            i
            for i in given
            if consts <= i < consts + carry and id(body.outputs[i - consts]) not in found
        }
        if not lost:
            break
        given -= lost
    zero = {i for i in given if i < consts + carry}
    made = [body.inputs[i] for i in sorted(zero)]
    _drop(body, inside)
    if not zero:
        return []
    body.steps = [*_make(made), *body.steps]
    carried = {i - consts for i in zero if i >= consts}
    results = [step.outputs[i] for i in sorted(carried)]
    zeros.update(map(id, results))
    step.inputs = [v for i, v in enumerate(step.inputs) if i not in zero]
    body.inputs = [v for i, v in enumerate(body.inputs) if i not in zero]
    step.outputs = [v for i, v in enumerate(step.outputs) if i not in carried]
    body.outputs = [v for i, v in enumerate(body.outputs) if i not in carried]
    counts = {
        'num_consts': consts - (len(zero) - len(carried)),
        'num_carry': carry - len(carried),
    }
    step.params = {**step.params, **counts}
    return _make(results)


def _find(block: Block, zeros: set[int]) -> set[int]:
    """The ids of the values of a block that are 0, without a change."""
    for step in block.steps:
        if not step.bodies and _is_zero(step, zeros):
            zeros.add(id(step.outputs[0]))
    zeros.update(id(value) for value in block.outputs if _known(value, zeros))
    return zeros


def _make(values: Iterable[Value]) -> list[Step]:
    """Steps that make zeros, for whoever still reads them."""
    steps = []
    for value in values:
        zero = Value((), value.dtype, [], [], (), value.manual, constant=0)
        params = {'shape': value.shape, 'broadcast_dimensions': (), 'sharding': None}
        steps.append(Step('broadcast_in_dim', params, [zero], [value]))
    return steps
