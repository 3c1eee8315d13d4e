"""What a step changes: the step itself, the parameters, the optimizer's statistics."""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from partitioning import unbox


@flax.struct.dataclass
class TrainState:
    """A pytree of arrays.

    Attributes:
      step: int32 scalar, the number of updates done.
      params: parameters.
      opt_state: statistics of an optax transformation.
    """

    step: jax.Array
    params: Any
    opt_state: Any

    @classmethod
    def create(cls, params: Any, tx: optax.GradientTransformation) -> TrainState:
        """The state before the first step.

        Args:
          params: parameters; linen boxes stay on them, and their names say how the optimizer's
            statistics are laid out too (`partitioning.state.get_logical_axes`).
          tx: the optimizer.
        """
        return cls(step=jnp.int32(0), params=params, opt_state=tx.init(unbox(params)))

    def apply_gradients(self, grads: Any, tx: optax.GradientTransformation) -> TrainState:
        """The state after an update by `grads`, a tree like `params`."""
        updates, opt_state = tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return TrainState(step=self.step + 1, params=params, opt_state=opt_state)
