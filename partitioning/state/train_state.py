"""A train state in T5X's manner, for any optax transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.state.boxes import unbox
from partitioning.state.walk import walk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes, as a pytree of arrays.

    Usage:
      state = TrainState.create(model.init(key, x), optax.adamw(1e-3))
      state = state.apply_gradients(grads, tx)

    Attributes:
      step: int32 scalar, the number of updates done.
      params: parameters.
      opt_state: statistics of an optax transformation.
      params_axes: T5X's collection of AxisMetadata, without arrays; None where parameters carry
        their names in boxes or have none.
      flax_mutables: collections that the model changes, such as 'batch_stats'.
      flax_mutables_axes: AxisMetadata of these, as `params_axes`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    params_axes: Any = None
    flax_mutables: Any = None
    flax_mutables_axes: Any = None

    # The optimizer's state follows the parameters, whatever names it has.
    names_follow_parameters = True

    @classmethod
    def create(cls, variables: Any, tx: Any) -> TrainState:
        """The state before the first step.

        Args:
          variables: what `model.init` returns, with a collection 'params'; or parameters alone.
            linen boxes stay on them, and name what the optimizer keeps of them too.
          tx: an optax transformation.
        """
        if not isinstance(variables, Mapping) or 'params' not in variables:
            variables = {'params': variables}
        mutables = {k: v for k, v in variables.items() if k != 'params'}
        axes = {k: mutables.pop(k) for k in list(mutables) if k.endswith('_axes')}
        params_axes = axes.pop('params_axes', None)
        return cls(
            step=jnp.int32(0),
            params=variables['params'],
            opt_state=tx.init(unbox(variables['params'])),
            params_axes=params_axes,
            flax_mutables=mutables or None,
            flax_mutables_axes={k.removesuffix('_axes'): v for k, v in axes.items()} or None,
        )

    def apply_gradients(self, grads: Any, tx: Any, flax_mutables: Any = None) -> TrainState:
        """The state after an update by `grads`, a tree like `params`."""
        import optax  # heavy, and only tracing needs it

        updates, opt_state = tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        changed = {} if flax_mutables is None else {'flax_mutables': flax_mutables}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changed)

    def replace(self, **changes: Any) -> TrainState:
        """The state with other values for some of its fields."""
        return dataclasses.replace(self, **changes)

    def replace_params(self, params: Any) -> TrainState:
        """The state with other parameters."""
        return self.replace(params=params)

    def replace_step(self, step: jax.Array) -> TrainState:
        """The state at another step."""
        return self.replace(step=step)

    def as_logical_axes(self) -> TrainState:
        """The state with AxisNames for leaves; see `partitioning.state.get_logical_axes`."""
        return walk(self).map(lambda leaf: leaf.names)

    def state_dict(self) -> dict[str, Any]:
        """The arrays in nested dicts, as `flax.serialization` makes them: for checkpoints."""
        from flax import serialization

        held = {
            'step': self.step,
            'params': unbox(self.params),
            'opt_state': self.opt_state,
            'flax_mutables': self.flax_mutables,
        }
        return serialization.to_state_dict({k: v for k, v in held.items() if v is not None})

    def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
        """The state with the arrays of a `state_dict`.

        Raises:
          ValueError: the dict has not just the arrays of this state.
        """
        from flax import serialization

        mine = self.state_dict()
        if unequal := sorted(mine.keys() ^ state_dict.keys()):
            raise ValueError(
                f'a state of {", ".join(mine)} cannot take one of {", ".join(state_dict)}: '
                f'{unequal[0]!r} is only in one of them'
            )
        fields = ('step', 'params', 'opt_state', 'flax_mutables')
        held = {k: unbox(getattr(self, k)) for k in fields if k in mine}
        return self.replace(**serialization.from_state_dict(held, dict(state_dict)))
