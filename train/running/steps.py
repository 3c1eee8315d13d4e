"""The train step: a pure function of a state and a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from partitioning import TrainState, with_sharding_constraint
from partitioning.state import path_str
from train.config import GradientDType, NotFinitePolicy
from train.objectives import Loss, Objective, compute_loss
from train.objectives.objective import Batch, Ratio, divide
from train.optimizers import global_norm
from train.running.stopping import NOT_FINITE, describe_not_finite

# A metric is a scalar, or a `Ratio` of two.
Metrics = dict[str, Any]


def make_train_step(
    objective: Objective,
    tx: optax.GradientTransformation,
    *,
    key: jax.Array,
    num_microbatches: int,
    data_spec: jax.sharding.PartitionSpec,
    learning_rate: Callable[[TrainState], jax.Array | None] = lambda state: None,
    weight_metrics: bool = False,
    gradient_dtype: GradientDType = 'float32',
    accumulation_dtype: GradientDType = 'float32',
    not_finite: NotFinitePolicy = 'ignore',
    average: Callable[[TrainState], TrainState] = lambda state: state,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the function (state, batch) -> (state, metrics) that does one update.

    Args:
      key: the key of the random numbers of the model. Step n uses fold_in(key, n), so a resumed
        run repeats them.
      num_microbatches: the number of parts of a batch. Their gradients are computed one after
        another and summed before the update. The variables of the model pass from each part to the
        next.
      data_spec: the PartitionSpec of the batch, which microbatches keep.
      learning_rate: returns the learning rate of the update that led to a state, to be reported,
        or None.
      weight_metrics: whether to add the metrics of every parameter, see `per_parameter_metrics`.
      gradient_dtype: the dtype of the gradients that the optimizer gets.
      accumulation_dtype: the dtype of the sums of the gradients of microbatches.
      not_finite: 'ignore' looks at nothing. The others add the metric `health.NOT_FINITE`, and
        'skip' also keeps the state as it is, but for its step, if anything is not finite.
      average: adds the new parameters to the average that the state keeps, if any.
    """

    whole = num_microbatches == 1
    gradients = functools.partial(
        _compute_gradients, objective, whole, gradient_dtype if whole else accumulation_dtype
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(key, state.step)
        variables = state.flax_mutables or {}
        if whole:
            grads, (_, sums, variables) = gradients(state.params, batch, rng, variables)
        else:
            parts = jax.tree.map(lambda x: _split_batch(x, num_microbatches, data_spec), batch)
            grads, sums, variables = _sum_over_microbatches(
                functools.partial(gradients, state.params), parts, rng, variables
            )
            divisor = objective.divisor(sums, batch)
            grads = jax.tree.map(lambda g: (g / divisor).astype(gradient_dtype), grads)
        if gradient_dtype == 'float32':
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        new_state = average(state.apply_gradients(grads, tx, variables or None))
        metrics = objective.metrics(sums, batch) | {
            'gradient_norm': global_norm(grads),
            'parameter_norm': optax.tree.norm(new_state.params),
        }
        if (rate := learning_rate(new_state)) is not None:
            metrics['learning_rate'] = rate
            if objective.averages:
                metrics |= {'learning_rate': Ratio(rate, 1.0), 'learning_rate/current': rate}
        if weight_metrics:
            metrics |= per_parameter_metrics(state.params, grads, new_state.params)
        if not_finite != 'ignore':
            norms = metrics['gradient_norm'], metrics['parameter_norm']
            loss = metrics['loss']
            loss = loss.total if isinstance(loss, Ratio) else loss
            metrics[NOT_FINITE] = describe_not_finite(loss, *norms, new_state)
        if not_finite == 'skip':
            bad = metrics[NOT_FINITE] != 0
            kept = jax.tree.map(lambda old, new: jnp.where(bad, old, new), state, new_state)
            new_state = kept.replace(step=new_state.step)
        return new_state, metrics

    return train_step


def _compute_gradients(
    objective: Objective,
    divides: bool,
    dtype: GradientDType,
    params: Any,
    batch: Batch,
    rng: jax.Array,
    variables: Any,
) -> tuple[Any, Loss]:
    """The gradients of the loss of a batch, or of its sum unless `divides`, and the loss."""

    def loss(params: Any) -> tuple[jax.Array, Loss]:
        result = compute_loss(objective, params, batch, rng, variables)
        if not divides:
            return result.total, result
        # Divided before the backward pass, as in T5X: optimizers that divide by tiny second
        # moments amplify any other rounding.
        divisor = jax.lax.stop_gradient(objective.divisor(result.sums, batch))
        return result.total / divisor, result

    grads, result = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda g: g.astype(dtype), grads), result


def _sum_over_microbatches(
    gradients: Callable[..., tuple[Any, Loss]], parts: Batch, rng: jax.Array, variables: Any
) -> tuple[Any, Any, Any]:
    """The sums of the gradients and of the metrics, and the variables after the last part.

    Args:
      gradients: the function (part, key, variables) -> (gradients, loss).
      rng: part n uses fold_in(rng, n).
    """

    def add(carry: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        (grads, sums), variables = carry
        key = jax.random.fold_in(rng, part[1])
        new, (_, new_sums, changed) = gradients(part[0], key, variables)
        # Each device sums shards, laid out like the optimizer's state, which receives them.
        return (jax.tree.map(jnp.add, (grads, sums), (new, new_sums)), changed), None

    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(gradients, first, rng, variables)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[1].sums))
    numbers = jnp.arange(len(jax.tree.leaves(parts)[0]))
    ((grads, sums), variables), _ = jax.lax.scan(add, (zeros, variables), (parts, numbers))
    return grads, sums, variables


def per_parameter_metrics(before: Any, grads: Any, after: Any) -> Metrics:
    """Returns T5X's weight metrics: the RMS of weights, gradients and updates, and max |weight|."""

    def rms(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

    updates = jax.tree.map(jnp.subtract, after, before)
    measured = {
        'weight_rms': jax.tree.map(rms, after),
        'weight_gradient_rms': jax.tree.map(rms, grads),
        'weight_update_rms': jax.tree.map(rms, updates),
        'weight_max': jax.tree.map(lambda x: jnp.max(jnp.abs(x)), after),
    }
    leaves = jax.tree_util.tree_leaves_with_path
    return {
        f'{name}/{path_str(path)}': value
        for name, tree in measured.items()
        for path, value in leaves(tree)
    }


class RecordedMetrics:
    """The metrics of the steps since the last record."""

    def __init__(self) -> None:
        self._last: Metrics = {}
        self._ratios: dict[str, Ratio] = {}

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of a step. It does not wait for the devices."""
        ratios = {name: x for name, x in metrics.items() if isinstance(x, Ratio)}
        self._last = metrics
        self._ratios = _add_all(self._ratios, ratios) if self._ratios else ratios

    def read(self) -> dict[str, float]:
        """The sums of ratios, divided, and all other metrics of the last step."""
        return {
            name: divide(self._ratios[name]) if name in self._ratios else float(value)
            for name, value in self._last.items()
        }

    def clear(self) -> None:
        """Begins a new record."""
        self._last, self._ratios = {}, {}


@jax.jit
def _add_all(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def _split_batch(x: jax.Array, parts: int, spec: jax.sharding.PartitionSpec) -> jax.Array:
    """Reshapes [batch, ...] to [parts, batch / parts, ...] without moving rows between devices.

    Part m takes the rows m, m + parts, ..., so each device keeps its rows.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return with_sharding_constraint(rows, jax.sharding.PartitionSpec(None, *spec))
