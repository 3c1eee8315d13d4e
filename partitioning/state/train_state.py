"""A train state like T5X's, for any optax transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.state.boxes import path_str, rebox, shape_of, unbox
from partitioning.state.traversal import walk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The arrays that a training step changes, as a pytree.

    Usage:
      state = TrainState.create(model.init(key, x), optax.adamw(1e-3))
      state = state.apply_gradients(grads, tx)

    Attributes:
      step: the number of completed updates, an int32 scalar.
      params: the parameters, in linen boxes or not.
      opt_state: the state of an optax transformation.
      params_axes: T5X's collection of AxisMetadata, which contains no arrays. None if the
        parameters carry their names in boxes or have no names.
      flax_mutables: the collections that the model changes, such as 'batch_stats', or None.
      flax_mutables_axes: the AxisMetadata of `flax_mutables`, as in `params_axes`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    params_axes: Any = None
    flax_mutables: Any = None
    flax_mutables_axes: Any = None

    # `walk` reads this: statistics get the axes of their parameters.
    names_follow_parameters = True

    @classmethod
    def create(cls, variables: Any, tx: Any) -> TrainState:
        """Creates the state before the first step.

        Args:
          variables: the result of `model.init`, with a collection 'params', or only the
            parameters. linen boxes are kept; their names also apply to the optimizer state.
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
        """Updates the parameters once.

        Args:
          grads: the gradients, a tree like `params`, with or without boxes.
          tx: the optax transformation that the state was created with.
          flax_mutables: the new `flax_mutables`; None keeps the current ones.

        Returns:
          The state after the update.
        """
        import optax  # slow to import, and needed only here

        held = unbox(self.params)
        updates, opt_state = tx.update(unbox(grads), self.opt_state, held)
        params = rebox(self.params, optax.apply_updates(held, updates))
        changed = {} if flax_mutables is None else {'flax_mutables': flax_mutables}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changed)

    def replace(self, **changes: Any) -> TrainState:
        """A copy of the state with other values for some fields."""
        return dataclasses.replace(self, **changes)

    def replace_params(self, params: Any) -> TrainState:
        """A copy of the state with other parameters."""
        return self.replace(params=params)

    def replace_step(self, step: jax.Array) -> TrainState:
        """A copy of the state with another step number."""
        return self.replace(step=step)

    def as_logical_axes(self) -> TrainState:
        """The state with AxisNames in place of arrays; see `partitioning.get_logical_axes`."""
        return walk(self).map(lambda leaf: leaf.names)

    def state_dict(self) -> dict[str, Any]:
        """The arrays in nested dicts for a checkpoint, in the format of `flax.serialization`."""
        from flax import serialization

        return serialization.to_state_dict(self._arrays())

    def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
        """A copy of the state with the arrays of `state_dict`.

        Args:
          state_dict: nested dicts of arrays, as `state_dict()` returns them.

        Raises:
          ValueError: if the paths or shapes of the arrays differ from those of this state.
        """
        from flax import serialization

        ours, theirs = _describe(self.state_dict()), _describe(state_dict)
        for path in sorted(ours.keys() | theirs.keys()):
            here, there = (arrays.get(path, 'not an array') for arrays in (ours, theirs))
            if here != there:
                raise ValueError(f'{path} is {there} in the state_dict, but {here} in this state')
        restored = serialization.from_state_dict(self._arrays(), dict(state_dict))
        return self.replace(
            **{name: rebox(getattr(self, name), value) for name, value in restored.items()}
        )

    def _arrays(self) -> dict[str, Any]:
        """The fields that hold arrays, without their boxes."""
        names = ('step', 'params', 'opt_state', 'flax_mutables')
        held = {name: unbox(getattr(self, name)) for name in names}
        return {name: value for name, value in held.items() if value is not None}


def _describe(state_dict: Any) -> dict[str, str]:
    """The arrays of a state_dict by path, in words."""
    flat = jax.tree_util.tree_leaves_with_path(state_dict)
    return {
        path_str(path): f'an array of shape {shape_of(leaf)}'
        for path, leaf in flat
        if not isinstance(leaf, str)
    }
