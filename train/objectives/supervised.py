"""An objective for any model: a loss and metrics for each row of a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from train.errors import ConfigError
from train.objectives.modules import as_model
from train.objectives.objective import Batch, Loss, Model, Objective, Variables, row_weights

PerRow = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervised(Objective):
    """Minimizes the mean of a loss over the rows, plus the model's auxiliary losses.

    Usage:
      Supervised(
        model=Cnn(),
        inputs='image',
        targets='label',
        row_loss=optax.losses.softmax_cross_entropy_with_integer_labels,
        row_metrics={'accuracy': lambda logits, label: logits.argmax(-1) == label},
      )

    Attributes:
      model: a linen module, or a function or class that creates an nnx module from `nnx.Rngs`. It
        may have batch statistics, dropout and auxiliary losses; see `LinenModel` and `NnxModel`.
      inputs: the arrays of the batch that the model is called with: a name, or several names.
      row_loss: a function (outputs, targets) -> the loss of each row, [batch] or [batch, ...]. The
        loss of a row with several values is their mean.
      targets: the array of the batch that `row_loss` and `row_metrics` get next to the outputs. By
        default, they get the whole batch, a dict of arrays.
      row_metrics: functions like `row_loss`, by name. Their means over the rows are reported.
    """

    model: Any
    inputs: str | Sequence[str]
    row_loss: PerRow
    targets: str | None = None
    row_metrics: Mapping[str, PerRow] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        as_model(self.model)
        for name, function in {'row_loss': self.row_loss, **self.row_metrics}.items():
            if not callable(function):
                raise ConfigError(
                    f'Supervised: {name} is {function!r}: it must be a function of the outputs of '
                    'the model and the targets'
                )

    @functools.cached_property
    def _model(self) -> Model:
        return as_model(self.model)

    def init(self, key: jax.Array, batch: Batch) -> Variables:
        return self._model.init(key, *self._inputs(batch))

    def loss(self, params: Any, batch: Batch, rng: jax.Array | None, variables: Variables) -> Loss:
        applied = self._model.apply({'params': params, **variables}, rng, *self._inputs(batch))
        targets = batch if self.targets is None else _array(batch, self.targets)
        weights = row_weights(batch)

        def total(name: str, function: PerRow) -> jax.Array:
            values = jnp.asarray(function(applied.outputs, targets), jnp.float32)
            if values.shape[:1] != weights.shape:
                raise ConfigError(
                    f'Supervised: {name} returns an array of shape {values.shape} for a batch of '
                    f'{weights.size} rows: return one value per row'
                )
            return jnp.sum(values.reshape(weights.size, -1).mean(axis=1) * weights)

        sums = {'weight': weights.sum(), 'loss': total('row_loss', self.row_loss)}
        sums |= {name: total(name, function) for name, function in self.row_metrics.items()}
        sums = applied.add_sown(sums)
        return Loss(sums['loss'] + sums.get('auxiliary_loss', 0.0), sums, applied.variables)

    def _inputs(self, batch: Batch) -> list[jax.Array]:
        names = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return [_array(batch, name) for name in names]


def _array(batch: Batch, name: str) -> jax.Array:
    if name not in batch:
        raise ConfigError(f'Supervised: the batch has no array {name!r}; it has {", ".join(batch)}')
    return batch[name]
