"""Models as pure functions: one interface for linen and nnx modules."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.errors import ConfigError

# The arguments of a model's __call__ that tell it to train, and those that tell it to evaluate.
TRAINING = ('train', 'training', 'is_training')
EVALUATING = ('deterministic', 'use_running_average')
# What a linen model sows into this collection is added to its loss.
LOSSES = 'losses'


class Applied(NamedTuple):
    """The result of a model.

    Attributes:
      outputs: what the model returned.
      variables: the values of the variables that are not parameters.
      auxiliary_loss: the sum of the auxiliary losses, a scalar, or None if the model has none.
    """

    outputs: Any
    variables: Mapping[str, Any]
    auxiliary_loss: jax.Array | None


class Model(abc.ABC):
    """A model as two pure functions."""

    @abc.abstractmethod
    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Returns the variables by collection. The parameters are under 'params'."""

    @abc.abstractmethod
    def apply(
        self, variables: Mapping[str, Any], rng: jax.Array | None, *args: Any, **kwargs: Any
    ) -> Applied:
        """Calls the model. It trains if `rng` is a key, and evaluates if `rng` is None."""


def as_model(model: Any) -> Model:
    """Adapts a linen module, or a function or class that creates an nnx module from `nnx.Rngs`.

    Raises:
      ConfigError: if `model` is neither.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        return LinenModel(model)
    is_class = inspect.isclass(model)
    wrong = is_class and issubclass(model, nn.Module)
    # An nnx module may be callable itself. Its class tells it from a function that creates one.
    created = not is_class and hasattr(type(model), '_pytree_meta_construct')
    if callable(model) and not wrong and not created:
        from train.objectives.nnx_model import NnxModel

        return NnxModel(model)
    kind = f'the class {model.__name__}' if wrong else f'of type {type(model).__name__}'
    raise ConfigError(
        f'the model is {kind}: it must be a linen module, such as Mlp(), or a function that '
        'creates an nnx module, such as lambda rngs: Mlp(rngs=rngs)'
    )


def mode_arguments(call: Callable[..., Any], training: bool) -> dict[str, Any]:
    """Returns the argument of a model's `__call__` that tells whether it trains, if it has one."""
    parameters = inspect.signature(call).parameters
    modes = dict.fromkeys(TRAINING, training) | dict.fromkeys(EVALUATING, not training)
    return {name: value for name, value in modes.items() if name in parameters}


def add_losses(sown: Any) -> jax.Array | None:
    """Returns the sum of the values that a model has sown as auxiliary losses, or None."""
    values = jax.tree.leaves(sown)
    return sum(map(jnp.sum, values), jnp.float32(0)) if values else None


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A linen module.

    Its auxiliary losses are the values that it sows into the collection 'losses'. While it trains,
    it may change all its collections except the parameters.
    """

    module: nn.Module

    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        mode = mode_arguments(type(self.module).__call__, training=False)
        variables = self.module.init(key, *args, **mode, **kwargs)
        return {name: value for name, value in variables.items() if name != LOSSES}

    def apply(
        self, variables: Mapping[str, Any], rng: jax.Array | None, *args: Any, **kwargs: Any
    ) -> Applied:
        training = rng is not None
        held = [name for name in variables if name != 'params']
        outputs, changed = self.module.apply(
            variables,
            *args,
            **mode_arguments(type(self.module).__call__, training),
            **kwargs,
            rngs=None if rng is None else {'dropout': rng},
            mutable=[LOSSES, *(held if training else ())],
        )
        others = {name: changed.get(name, variables[name]) for name in held}
        for name, value in others.items():
            if len(jax.tree.leaves(value)) != len(jax.tree.leaves(variables[name])):
                raise ConfigError(
                    f'the collection {name!r} of the model grows in every step, as what a model '
                    "sows does: sow auxiliary losses into 'losses', others into 'intermediates'"
                )
        return Applied(outputs, others, add_losses(changed.get(LOSSES)))
