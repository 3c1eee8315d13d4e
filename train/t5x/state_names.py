"""T5X's names of the arrays of a state, as they are in its checkpoints and assignment maps."""

from __future__ import annotations

from typing import Any

import jax

from partitioning.state.boxes import key_names
from train.optimizers.factored import AdafactorState

# The beginnings of the names of what an evaluation needs.
VARIABLES = ('state/step', 'target', 'flax_mutables')
STEP = 'state/step'


def names_of(state: Any) -> list[str]:
    """T5X's names of the arrays of a TrainState, in the order of its leaves.

    The parameter at params/encoder/norm/scale is target/encoder/norm/scale. Its second moment in
    T5X's Adafactor is state/param_states/encoder/norm/scale/v. T5X has one number of steps, so the
    count of that Adafactor is state/step as well. The state of any other optax transformation has
    the path that T5X gives it, state/param_states/<path in the state of the transformation>.

    Args:
      state: a TrainState, abstract or not.
    """
    flat = jax.tree_util.tree_leaves_with_path(state)
    adafactors = _adafactor_paths(state.opt_state)
    return [_name(key_names(path), adafactors) for path, _ in flat]


def _adafactor_paths(opt_state: Any) -> list[tuple[str, ...]]:
    """Where in the state of the optimizer a state of T5X's Adafactor is."""
    flat = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_adafactor)
    return [key_names(path) for path, x in flat if _is_adafactor(x)]


def _is_adafactor(x: Any) -> bool:
    return isinstance(x, AdafactorState)


def _name(path: tuple[str, ...], adafactors: list[tuple[str, ...]]) -> str:
    field, *rest = path
    if field == 'step':
        return STEP
    if field == 'params':
        return '/'.join(['target', *rest])
    if field != 'opt_state':
        return '/'.join(path)
    for start in adafactors:
        if tuple(rest[: len(start)]) == start:
            statistic, *parameter = rest[len(start) :]
            if not parameter:
                return STEP
            return '/'.join(['state/param_states', *parameter, statistic])
    return '/'.join(['state/param_states', *rest])
