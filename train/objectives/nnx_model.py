"""nnx modules as pure functions. This module loads flax.nnx, so it is imported when needed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from train.objectives.objective import Applied, Model, add_losses, average_metrics, mode_arguments


class AuxiliaryLoss(nnx.Variable):
    """What a model sows as this type is added to its loss: `self.sow(AuxiliaryLoss, name, x)`."""


class Metric(nnx.Variable):
    """The mean of what the layers of a model sow as this type is reported by its name."""


@dataclasses.dataclass(frozen=True)
class NnxModel(Model):
    """An nnx module, given as a function or class that creates it from `nnx.Rngs`.

    All its variables that are neither parameters nor states of random numbers, such as
    `nnx.BatchStat`, are in the collection 'nnx'. Dropout gets new random numbers in each step.
    """

    create: Callable[[nnx.Rngs], nnx.Module]

    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        with nnx.use_eager_sharding(False):
            _, params, _, others = _split(self.create(nnx.Rngs(key)))
        return _variables(params, others)

    def apply(
        self, variables: Mapping[str, Any], rng: jax.Array | None, *args: Any, **kwargs: Any
    ) -> Applied:
        graph, random_shapes, _ = self._structure
        random = _fill(random_shapes, jax.random.key(0) if rng is None else rng)
        others = variables.get('nnx', nnx.State({}))
        # A copy, because variables of another trace cannot be changed.
        module = nnx.merge(graph, variables['params'], random, others, copy=True)
        module.eval() if rng is None else module.train()
        kwargs |= mode_arguments(type(module).__call__, rng is not None)
        if hasattr(nnx, 'capture'):
            capturing = nnx.capture(module, AuxiliaryLoss, Metric, nnx.Intermediate)
            outputs, losses, metrics, _ = capturing(*args, **kwargs)
        else:  # older versions of flax keep what is sown in the module
            outputs = module(*args, **kwargs)
            losses, metrics = nnx.pop(module, AuxiliaryLoss), nnx.pop(module, Metric)
            nnx.pop(module, nnx.Intermediate)
        _, params, _, others = _split(module)
        changed = {k: v for k, v in _variables(params, others).items() if k != 'params'}
        return Applied(outputs, changed, add_losses(losses), average_metrics(metrics))

    def takes(self, name: str) -> bool:
        return name in inspect.signature(self._structure[2].__call__).parameters

    @functools.cached_property
    def _structure(self) -> tuple[Any, Any, type]:
        """The static part of the module, the shapes of its states of random numbers, its class."""
        with nnx.use_eager_sharding(False):
            module = nnx.eval_shape(lambda: self.create(nnx.Rngs(0)))
            graph, _, random, _ = _split(module)
        return graph, random, type(module)


def _split(module: nnx.Module) -> Any:
    """Splits a module into its structure, parameters, states of random numbers, and the rest."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _variables(params: nnx.State, others: nnx.State) -> dict[str, Any]:
    return {'params': params} | ({'nnx': others} if len(others) else {})


def _fill(shapes: Any, key: jax.Array) -> Any:
    """Returns states of random numbers: every key is derived from `key`, every count is 0."""
    leaves, structure = jax.tree.flatten(shapes)
    filled = [
        jax.random.fold_in(key, i)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, filled)
