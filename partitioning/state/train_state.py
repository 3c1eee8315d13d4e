"""A train state like T5X's, for any optax transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.short_help import ShortHelp
from partitioning.state.boxes import path_str, rebox, shape_of, unbox
from partitioning.state.traversal import walk
from partitioning.values import kind_str

# The classes of states that flax.serialization handles.
_KNOWN_TO_FLAX: set[type] = set()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState(metaclass=ShortHelp):
    """The arrays that a training step changes, as a pytree.

    Usage:
      state = TrainState.create(model.init(key, x), optax.adamw(1e-3))
      state = state.apply_gradients(grads, tx)

    `flax.serialization` saves and restores the arrays of a state, as `state_dict` and
    `restore_state` do: `to_bytes(state)`, `from_bytes(state, data)`.

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

    def __post_init__(self) -> None:
        if type(self) not in _KNOWN_TO_FLAX:  # runs at every step, so it does nothing else
            _register_with_flax(type(self))

    def __setstate__(self, held: dict[str, Any]) -> None:
        _register_with_flax(type(self))  # a pickle is restored without __init__
        vars(self).update(held)

    @classmethod
    def create(cls, variables: Any = None, tx: Any = None, **flax: Any) -> TrainState:
        """Creates the state before the first step.

        Args:
          variables: the result of `model.init`, with a collection 'params', or only the
            parameters. linen boxes are kept; their names also apply to the optimizer state.
          tx: an optax transformation.
        """
        if flax or not hasattr(tx, 'init'):
            order = ' in this order' if hasattr(variables, 'init') else ''
            raise TypeError(
                f'TrainState.create got {_forms(variables, tx, flax)}{order}: write '
                'TrainState.create(params, tx), with an optax transformation tx and without '
                "other fields of flax's TrainState, such as apply_fn"
            )
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

    def apply_gradients(self, grads: Any, tx: Any = None, flax_mutables: Any = None) -> TrainState:
        """Updates the parameters once.

        Args:
          grads: the gradients, a tree like `params`, with or without boxes.
          tx: the optax transformation that the state was created with.
          flax_mutables: the new `flax_mutables`; None keeps the current ones.

        Raises:
          TypeError: if `tx` is not an optax transformation.
          ValueError: if the gradients or the transformation do not fit the state.
        """
        if not hasattr(tx, 'init'):
            order = ' in this order' if hasattr(grads, 'init') else ''
            raise TypeError(
                f'apply_gradients got {_forms(grads, tx, {})}{order}: a TrainState does not hold '
                'its optimizer, so write state.apply_gradients(grads, tx)'
            )
        import optax  # slow to import, and needed only here

        held = unbox(self.params)
        try:
            updates, opt_state = tx.update(unbox(grads), self.opt_state, held)
        except Exception:
            self._check_fit(unbox(grads), tx)
            raise
        params = rebox(self.params, optax.apply_updates(held, updates))
        changed = {} if flax_mutables is None else {'flax_mutables': flax_mutables}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changed)

    def _check_fit(self, grads: Any, tx: Any) -> None:
        """Raises ValueError if gradients or an optimizer of another structure explain an error."""
        held = unbox(self.params)
        grads_of, params_of = _paths(grads), _paths(held)
        if lack := [path for path in params_of if path not in grads_of]:
            raise ValueError(
                f'the gradients lack {len(lack)} of {len(params_of)} parameters, first {lack[0]}: '
                'pass the gradients of state.params'
            ) from None
        if more := [path for path in grads_of if path not in params_of]:
            raise ValueError(
                f'the gradients have {more[0]}, which is no parameter of the state: pass the '
                'gradients of state.params'
            ) from None
        made: Any = jax.eval_shape(tx.init, held)
        theirs: Any = jax.tree.structure(made)
        if theirs != jax.tree.structure(self.opt_state):
            kinds = [
                ', '.join(dict.fromkeys(type(x).__name__ for x in _parts(tree))) or 'nothing'
                for tree in (self.opt_state, made)
            ]
            raise ValueError(
                f'the state has the optimizer state of another transformation, of {kinds[0]}, but '
                f'tx makes {kinds[1]}: pass the tx that the state was created with'
            ) from None

    def replace(self, **changes: Any) -> TrainState:
        """A copy of the state with other values for some fields."""
        return dataclasses.replace(self, **changes)

    def replace_params(self, params: Any) -> TrainState:
        """A copy of the state with other parameters."""
        return self.replace(params=params)

    def replace_step(self, step: jax.Array) -> TrainState:
        """A copy of the state with another step number."""
        return self.replace(step=step)

    def replace_flax_mutables(self, flax_mutables: Any) -> TrainState:
        """A copy of the state with other mutable collections."""
        return self.replace(flax_mutables=flax_mutables)

    @property
    def param_states(self) -> Any:
        """The state of the optimizer, by T5X's name."""
        return self.opt_state

    def apply_gradient(self, *args: Any, **kwargs: Any) -> TrainState:
        """T5X's method, whose states hold their optimizer; raises NotImplementedError here."""
        raise NotImplementedError(
            'a TrainState does not hold its optimizer: write state.apply_gradients(grads, tx), '
            'with the learning rate in tx'
        )

    def as_logical_axes(self) -> TrainState:
        """The state with AxisNames in place of arrays; see `partitioning.get_logical_axes`."""
        return walk(self).map(lambda leaf: leaf.names)

    def state_dict(self) -> dict[str, Any]:
        """The arrays in nested dicts for a checkpoint, in the format of `flax.serialization`."""
        from flax import serialization

        return serialization.to_state_dict(self._arrays())

    def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
        """A copy of the state with the arrays of `state_dict`.

        It takes nested dicts of arrays, as `state_dict()` returns them. Another path or shape than
        in this state is a ValueError.
        """
        return _restore(self, state_dict, ())

    def _arrays(self) -> dict[str, Any]:
        """The fields that hold arrays, without their boxes."""
        names = ('step', 'params', 'opt_state', 'flax_mutables')
        held = {name: unbox(getattr(self, name)) for name in names}
        if not held['flax_mutables']:
            del held['flax_mutables']
        return {name: value for name, value in held.items() if value is not None}


def _paths(tree: Any) -> list[str]:
    return [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _parts(opt_state: Any) -> list[Any]:
    """The states of the transformations in a chain that have arrays."""
    if type(opt_state) is tuple:
        return [part for one in opt_state for part in _parts(one)]
    return [opt_state] if jax.tree.leaves(opt_state) else []


def _forms(first: Any, second: Any, keywords: Mapping[str, Any]) -> str:
    """The arguments of a call in words: `a dict of 2 and a GradientTransformationExtraArgs`."""
    given = [kind_str(first)] if first is not None else []
    if second is not None:
        given.append(kind_str(second))
    elif given and not keywords:
        given.append('no tx')
    given += [f'{name}=' for name in keywords]
    return ' and '.join(given) or 'no arguments'


def _register_with_flax(cls: type[TrainState]) -> None:
    """Makes `flax.serialization` handle a class of states.

    It is called when the first state is made, because this module must not import flax.
    """
    from flax import serialization

    def restore(state: TrainState, state_dict: Mapping[str, Any]) -> TrainState:
        above = serialization.current_path().split('/')
        return _restore(state, state_dict, tuple(key for key in above if key != '.'))

    serialization.register_serialization_state(cls, cls.state_dict, restore, override=True)
    _KNOWN_TO_FLAX.add(cls)


def _restore(
    state: TrainState, state_dict: Mapping[str, Any], above: tuple[str, ...]
) -> TrainState:
    """The state with other arrays; `above` is its own path, for messages."""
    from flax import serialization

    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f'{"/".join(above) or "the state_dict"} is of type {type(state_dict).__name__}, but a '
            'TrainState is restored from nested dicts, such as state.state_dict()'
        )
    ours, theirs = _describe(state.state_dict()), _describe(state_dict)
    for path in sorted(ours.keys() | theirs.keys()):
        here, there = (arrays.get(path, 'not an array') for arrays in (ours, theirs))
        if here != there:
            whole = '/'.join((*above, path))
            raise ValueError(
                f'{whole} is {there} in the state_dict, but {here} in this state: restore into a '
                'state of the model and the optimizer that were saved'
            )
    restored = serialization.from_state_dict(state._arrays(), dict(state_dict))
    return state.replace(
        **{name: rebox(getattr(state, name), value) for name, value in restored.items()}
    )


def _describe(state_dict: Any) -> dict[str, str]:
    """The arrays of a state_dict by path, in words."""
    flat = jax.tree_util.tree_leaves_with_path(state_dict)
    return {
        path_str(path): f'an array of shape {shape_of(leaf)}'
        for path, leaf in flat
        if not isinstance(leaf, str)
    }
