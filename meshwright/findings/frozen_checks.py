"""Checks of frozen parameters: those that a step returns as they came, and trains all the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.findings.program_facts import ProgramFacts
from meshwright.findings.wording import and_more
from meshwright.jaxpr.primitives import MOVES
from meshwright.jaxpr.values import Value
from partitioning.amounts import bytes_str, share_str
from partitioning.plan.findings import Finding

_SHARE = 0.02  # of the arguments of a device, for moments of frozen parameters to be told
_DEEP = 8  # steps between a parameter and what is returned for it


def find_frozen_states(facts: ProgramFacts) -> Iterator[Finding]:
    """Parameters that do not change, although the optimizer updates their moments.

    Their updates are set to zero behind an optimizer that has gradients and moments of all.
    """
    made, given = facts.block.outputs, facts.block.inputs
    kept = {i for n, i in facts.pairs.items() if _is_kept(made[n], given[i])}
    updated = {i: n for n, i in facts.pairs.items() if i not in kept}
    moments = [i for i in updated if facts.owners.get(i) in kept]
    owners = sorted({facts.owners[i] for i in moments})
    held = sum(map(facts.shard_bytes, moments))
    total = sum(map(facts.shard_bytes, range(len(facts.held))))
    if not moments or held < _SHARE * total:
        return
    largest = max(moments, key=facts.shard_bytes)
    gradients = bytes_str(sum(map(facts.shard_bytes, owners)))
    line = made[updated[largest]].line
    names = facts.path(max(owners, key=facts.shard_bytes))
    yield Finding(
        'warning',
        'frozen parameters',
        line or names,
        f'{and_more(owners)}{names} is returned as it came, but its gradient is computed, and its '
        f'state such as {facts.path(largest)} is updated: {bytes_str(held)} on each device '
        f'({share_str(held / total)} of the arguments), and gradients of {gradients} that are '
        'summed; write optax.masked(optimizer, trained) in place of the optimizer, before what '
        'sets the other updates to zero, or take gradients of what is trained only',
    )


def _is_kept(made: Value, given: Value) -> bool:
    """Whether a result is an argument as it came, or plus zero."""
    for _ in range(_DEEP):
        if made is given:
            return True
        step = made.maker
        if step is None or step.bodies or not step.inputs:
            return False
        if step.name in MOVES and step.inputs[0].dtype == step.outputs[0].dtype:
            made = step.inputs[0]
        elif step.name in ('add', 'add_any', 'sub'):
            others = [one for one in step.inputs if not _is_zero(one)]
            if len(others) != 1 or (step.name == 'sub' and others[0] is not step.inputs[0]):
                return False
            made = others[0]
        else:
            return False
    return False


def _is_zero(value: Value, depth: int = 0) -> bool:
    """Whether an array has zeros only, as far as its last steps say."""
    if value.constant is not None:
        return value.size <= 1 and bool(np.all(np.asarray(value.constant) == 0))
    step = value.maker
    if step is None or step.bodies or not step.inputs or depth == _DEEP:
        return False
    if step.name in MOVES | {'broadcast_in_dim', 'neg'}:
        return _is_zero(step.inputs[0], depth + 1)
    return step.name == 'mul' and any(_is_zero(one, depth + 1) for one in step.inputs)
