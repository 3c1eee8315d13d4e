"""Models as pure functions: one interface for linen and nnx modules."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.errors import ConfigError

# The arguments of a model's __call__ that tell it to train, and those that tell it to evaluate.
TRAINING = ('train', 'training', 'is_training', 'enable_dropout')
EVALUATING = ('deterministic', 'use_running_average')
# What a linen model sows into these collections is added to its loss, and reported.
LOSSES, METRICS = 'losses', 'metrics'


class Applied(NamedTuple):
    """The result of a model.

    Attributes:
      outputs: what the model returned.
      variables: the values of the variables that are not parameters.
      auxiliary_loss: the sum of the auxiliary losses, a scalar, or None if the model has none.
      metrics: the metrics of the model by name, scalars: the mean over all layers that sow one.
    """

    outputs: Any
    variables: Mapping[str, Any]
    auxiliary_loss: jax.Array | None
    metrics: Mapping[str, jax.Array] = MappingProxyType({})

    def add_sown(self, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Adds what the model has sown to the sums that an objective reports.

        Args:
          sums: the sums of the objective, with 'weight', their divisor. Auxiliary loss and metrics
            are means, so they are multiplied by it.

        Raises:
          ConfigError: if the objective reports a metric of the model itself.
        """
        sown = dict(self.metrics)
        if self.auxiliary_loss is not None:
            sown['auxiliary_loss'] = self.auxiliary_loss
        if both := sorted(sown.keys() & sums.keys()):
            raise ConfigError(
                f'the model sows a metric {both[0]!r}, which the objective reports too: rename it'
            )
        return {**sums, **{name: value * sums['weight'] for name, value in sown.items()}}


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

    def takes(self, name: str) -> bool:
        """Whether the model has an argument with this name."""
        return False


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


def average_metrics(sown: Any) -> dict[str, jax.Array]:
    """Returns the mean of all values that the layers of a model have sown, by their last name."""
    values: dict[str, list[jax.Array]] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(sown):
        name = [str(entry.key) for entry in path if isinstance(getattr(entry, 'key', 0), str)][-1]
        values.setdefault(name, []).append(jnp.ravel(jnp.asarray(value, jnp.float32)))
    return {name: jnp.mean(jnp.concatenate(arrays)) for name, arrays in values.items()}


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A linen module.

    Its auxiliary losses are the values that it sows into the collection 'losses', and its metrics
    the means of those that it sows into 'metrics'. While it trains, it may change all its
    collections except the parameters.
    """

    module: nn.Module

    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        mode = mode_arguments(type(self.module).__call__, training=False)
        variables = self.module.init(key, *args, **mode, **kwargs)
        return {k: value for k, value in variables.items() if k not in (LOSSES, METRICS)}

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
            mutable=[LOSSES, METRICS, *(held if training else ())],
        )
        others = {name: changed.get(name, variables[name]) for name in held}
        for name, value in others.items():
            if len(jax.tree.leaves(value)) != len(jax.tree.leaves(variables[name])):
                raise ConfigError(
                    f'the collection {name!r} of the model grows in every step, as what a model '
                    "sows does: sow auxiliary losses into 'losses', means to be reported into "
                    "'metrics', and others into 'intermediates'"
                )
        metrics = average_metrics(changed.get(METRICS))
        return Applied(outputs, others, add_losses(changed.get(LOSSES)), metrics)

    def takes(self, name: str) -> bool:
        return name in inspect.signature(type(self.module).__call__).parameters
