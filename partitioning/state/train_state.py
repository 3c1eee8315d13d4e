"""A train state in T5X's manner, for any optax transformation."""

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
        """The state after an update by `grads`, a tree like `params`, in boxes or without."""
        import optax  # heavy, and only tracing needs it

        held = unbox(self.params)
        updates, opt_state = tx.update(unbox(grads), self.opt_state, held)
        params = rebox(self.params, optax.apply_updates(held, updates))
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

        return serialization.to_state_dict(self._arrays())

    def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
        """The state with the arrays of a `state_dict`.

        Raises:
          ValueError: the dict has not just the arrays of this state, in their shapes.
        """
        from flax import serialization

        ours, theirs = _shapes(self.state_dict()), _shapes(state_dict)
        for path in sorted(ours.keys() | theirs.keys()):
            if ours.get(path) != theirs.get(path):
                raise ValueError(
                    f'{path} is {_text(theirs.get(path))} in the state to restore, but '
                    f'{_text(ours.get(path))} in this one'
                )
        restored = serialization.from_state_dict(self._arrays(), dict(state_dict))
        return self.replace(
            **{name: rebox(getattr(self, name), value) for name, value in restored.items()}
        )

    def _arrays(self) -> dict[str, Any]:
        """The fields that hold arrays, without boxes."""
        names = ('step', 'params', 'opt_state', 'flax_mutables')
        held = {name: unbox(getattr(self, name)) for name in names}
        return {name: value for name, value in held.items() if value is not None}


def _shapes(state_dict: Any) -> dict[str, tuple[int, ...] | None]:
    flat = jax.tree_util.tree_leaves_with_path(state_dict, is_leaf=lambda x: x is None)
    return {
        path_str(path): None if leaf is None or isinstance(leaf, str) else shape_of(leaf)
        for path, leaf in flat
    }


def _text(shape: tuple[int, ...] | None) -> str:
    return 'no array' if shape is None else f'an array of shape {shape}'
