"""Modules of linen and nnx as models."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from train.errors import ConfigError
from train.objectives.objective import (
    LOSSES,
    METRICS,
    Applied,
    Model,
    add_losses,
    average_metrics,
    mode_arguments,
)


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


def as_model(model: Any) -> Model:
    """Adapts a linen module, or a function or class that creates an nnx module from `nnx.Rngs`.

    Raises a ConfigError if `model` is neither.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        return LinenModel(model)
    is_class = inspect.isclass(model)
    # An nnx module may be callable itself. Its class tells it from a function that creates one.
    is_nnx = hasattr(model if is_class else type(model), '_pytree_meta_construct')
    wrong, created = is_class and not is_nnx, is_nnx and not is_class
    if callable(model) and not wrong and not created:
        from train.objectives.nnx_model import NnxModel  # loads flax.nnx

        return NnxModel(model)
    kind = f'the class {model.__name__}' if wrong else f'of type {type(model).__name__}'
    raise ConfigError(
        f'the model is {kind}: it must be a linen module, such as Mlp(), or a function that '
        'creates an nnx module, such as lambda rngs: Mlp(rngs=rngs)'
    )
