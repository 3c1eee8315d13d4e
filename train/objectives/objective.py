"""The objective of a run, between the trainer and any model, and models as pure functions."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from train.errors import ConfigError

Batch = Mapping[str, jax.Array]
Variables = Mapping[str, Any]


class Loss(NamedTuple):
    """The loss of a batch.

    Attributes:
      total: the sum to minimize, a scalar. Gradients are divided by the weight of the whole batch.
      sums: the sums to report, scalars. Reports divide them by 'weight', which is the number of
        rows by default. 'loss' is `total` by default.
      variables: the new values of the variables that are not parameters, or {} if nothing changed.
    """

    total: jax.Array
    sums: Mapping[str, jax.Array] = MappingProxyType({})
    variables: Variables = MappingProxyType({})


class Ratio(NamedTuple):
    """A metric that is a sum divided by another sum, over all steps or batches of a record.

    Attributes:
      total, count: the parts of one step or batch, scalars.
    """

    total: Any
    count: Any


class Objective(abc.ABC):
    """A model and the loss that it minimizes.

    Usage:
      class Reconstruct(Objective):
        def init(self, key, batch):
          return model.init(key, batch['image'])

        def loss(self, params, batch, rng, variables):
          decoded = model.apply({'params': params}, batch['image'])
          return Loss(jnp.sum((decoded - batch['image']) ** 2))

    Attributes:
      averages: whether `metrics` returns a `Ratio` for each metric. A record then has those of
        all steps since the last one, and otherwise of its step alone.
    """

    averages: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, key: jax.Array, batch: Batch) -> Variables:
        """Creates the variables, for example `{'params': ..., 'batch_stats': ...}`.

        Args:
          batch: a batch of zeros, with the shapes and dtypes of the training batches.

        Returns:
          The parameters under 'params', and all other variables in their own collections. Boxes
          and nnx metadata with logical axes are kept.
        """

    @abc.abstractmethod
    def loss(
        self, params: Any, batch: Batch, rng: jax.Array | None, variables: Variables
    ) -> Loss | tuple[Any, ...]:
        """Computes the loss of a batch.

        Args:
          batch: the arrays of the batch, each [batch, ...]. In evaluations, 'row_weights' [batch]
            is 0 for the rows that fill up the last batch, and 1 for all others.
          rng: the random key of the step, for example for dropout. None evaluates the model.
          variables: all other variables, as `init` or the last step returned them.

        Returns:
          A `Loss`, or a tuple of its first fields.
        """

    def divisor(self, sums: Mapping[str, jax.Array], batch: Batch) -> jax.Array | float:
        """Returns what the gradients are divided by, given the sums over a whole batch."""
        return sums['weight']

    def metrics(self, sums: Mapping[str, jax.Array], batch: Batch) -> dict[str, Any]:
        """Returns what is reported of a step or batch, by name, given the sums over it."""
        return mean_metrics(sums)


def compute_loss(
    objective: Objective, params: Any, batch: Batch, rng: jax.Array | None, variables: Variables
) -> Loss:
    """Calls `objective.loss`, and fills in the defaults of its result.

    Raises a ValueError if the loss is not a scalar.
    """
    result = objective.loss(params, batch, rng, variables)
    loss = Loss(*result) if isinstance(result, tuple) else Loss(result)
    name = type(objective).__name__
    if not isinstance(loss.sums, Mapping) or isinstance(loss.total, Mapping | list | None):
        kind = type(result).__name__
        raise ValueError(f'{name}.loss returns a {kind}: it must return Loss(total, sums)')
    for label, value in {'total': loss.total, **loss.sums}.items():
        if shape := jax.numpy.shape(value):
            raise ValueError(
                f'{name}.loss returns {label} with the shape {shape}: it must be a scalar; sum it '
                'over the batch'
            )
    sums = {'loss': loss.total, **loss.sums}
    if 'weight' not in sums:
        sums['weight'] = row_weights(batch).sum()
    return Loss(loss.total, sums, {**variables, **loss.variables})


def row_weights(batch: Batch) -> jax.Array:
    """Returns the weights of the rows, float32 [batch]: 0 for rows of padding, otherwise 1."""
    if 'row_weights' in batch:
        return batch['row_weights']
    return jax.numpy.ones(next(iter(batch.values())).shape[0], jax.numpy.float32)


def make_eval_step(objective: Objective) -> Callable[[Any, Any, Batch], dict[str, jax.Array]]:
    """Returns a function (params, variables, batch) that computes the sums of the objective."""

    def eval_step(params: Any, variables: Any, batch: Batch) -> dict[str, jax.Array]:
        return dict(compute_loss(objective, params, batch, None, variables or {}).sums)

    return eval_step


def divide(ratio: Ratio) -> float:
    """Returns the value of a ratio; NaN if nothing was counted."""
    count = float(ratio.count)
    return float(ratio.total) / count if count else float('nan')


def mean_metrics(sums: Any) -> Any:
    """Returns all sums except the weight, divided by the weight."""
    return {name: value / sums['weight'] for name, value in sums.items() if name != 'weight'}


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
