"""The exponential moving average of the parameters of a run (EMA, or Polyak averaging)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partitioning import TrainState
from partitioning.state import unbox


class Average(NamedTuple):
    """The average of parameters over the updates of a run.

    Attributes:
      average: a tree like the parameters, in their layout. Floating-point arrays are at least
        float32, because a small part of a new value would be lost in bfloat16.
      updates: the number of updates that it averages, an int32 scalar.
    """

    average: Any
    updates: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AveragedState(TrainState):
    """A train state that keeps the average of its parameters.

    Attributes:
      ema: the average, whose arrays are saved as `ema/average/...`; None if it is not restored.
    """

    ema: Average | None = None

    @classmethod
    def create(cls, variables: Any = None, tx: Any = None, **flax: Any) -> AveragedState:
        made = super().create(variables, tx, **flax)
        assert isinstance(made, AveragedState)
        return made.replace(ema=start_average(made.params))

    def replace(self, **changes: Any) -> AveragedState:
        return dataclasses.replace(self, **changes)

    def _arrays(self) -> dict[str, Any]:
        held = super()._arrays()
        return held if self.ema is None else {**held, 'ema': self.ema}


def start_average(params: Any) -> Average:
    """The average before the first update: a copy of the parameters."""
    return Average(jax.tree.map(_copy, unbox(params)), jnp.int32(0))


def average_dtype(dtype: Any) -> Any:
    """The dtype in which an array of this dtype is averaged."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def update_average(state: AveragedState, decay: float, debias: bool) -> AveragedState:
    """Adds the parameters of a state to its average.

    After n updates with the parameters x_1, ..., x_n, which follow x_0, the average is

      decay^n x_0 + (1 - decay) sum_i decay^(n - i) x_i

    or with `debias`, which leaves out x_0 and divides by the sum of the other weights as Adam does,

      (1 - decay) / (1 - decay^n) sum_i decay^(n - i) x_i

    The debiased average itself is stored, so it can be read at any time: the newest parameters then
    have the weight (1 - decay) / (1 - decay^n), which is 1 for the first update.

    Args:
      state: the state after an update.
      decay: the weight of the average, 0 <= decay < 1.
      debias: whether the average forgets the initial parameters.
    """
    assert state.ema is not None
    updates = state.ema.updates + 1
    new = jnp.float32(1 - decay)
    if debias:
        new = new / (1 - jnp.float32(decay) ** updates)

    def add(average: jax.Array, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(average.dtype, jnp.inexact):
            return x
        return (1 - new) * average + new * x.astype(average.dtype)

    average = jax.tree.map(add, state.ema.average, unbox(state.params))
    return state.replace(ema=Average(average, updates))


def with_average(state: TrainState) -> TrainState:
    """The state with the averages in place of its parameters, in their dtypes, for an evaluation.

    A state that keeps no averages stays as it is.
    """
    ema = getattr(state, 'ema', None)
    if ema is None:
        return state

    def lay_out(x: jax.Array, average: jax.Array) -> jax.Array:
        # With rules for the optimizer, averages are sharded like its state.
        return jax.device_put(average.astype(x.dtype), x.sharding)

    return state.replace(params=jax.tree.map(lay_out, state.params, ema.average))


def _copy(x: jax.Array) -> jax.Array:
    """A copy of an array in the dtype of averages, so that a step may donate both."""
    return jnp.array(x, average_dtype(x.dtype), copy=True)
