"""The objective of a run: the interface between the trainer and any model."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax

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
          key: the random key.
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
          params: the parameters.
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
