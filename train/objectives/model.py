"""Models as pure functions: the interface, and what the adapters of linen and nnx share."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

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

        `sums` are the sums of the objective, with 'weight', their divisor. Auxiliary loss and
        metrics are means, so they are multiplied by it. Raises a ConfigError if the objective
        reports a metric of the model itself.
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
