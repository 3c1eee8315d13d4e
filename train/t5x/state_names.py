"""T5X's names of the arrays of a state, as they are in its checkpoints and assignment maps."""

from __future__ import annotations

from typing import Any

import jax

from partitioning.state.boxes import key_names
from train.checkpoints.formats.t5x_files import STEP, name_in_t5x
from train.optimizers.factored import AdafactorState

# The beginnings of the names of what an evaluation needs.
VARIABLES = (STEP, 'target', 'flax_mutables')


def names_of(state: Any) -> list[str]:
    """T5X's names of the arrays of a TrainState, in the order of its leaves; see `name_in_t5x`.

    Args:
      state: a TrainState, abstract or not.
    """
    optimizer = jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=_is_adafactor)
    adafactors = [
        '/'.join(('opt_state', *key_names(path))) for path, x in optimizer if _is_adafactor(x)
    ]
    names = ('/'.join(key_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(state))
    return [name_in_t5x(name, adafactors) for name in names]


def _is_adafactor(x: Any) -> bool:
    return isinstance(x, AdafactorState)
