"""Adafactor with T5X's factoring: the dimensions of a parameter are factored by their names.

optax's Adafactor factors the two largest dimensions of every parameter. This one can treat several
dimensions together as rows or as columns, and it keeps the statistics of stacked layers apart.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from partitioning.rules import nearest
from partitioning.state import path_str
from partitioning.state.boxes import is_carrier
from train.errors import ConfigError


class FactorDim(enum.Enum):
    """What a dimension of a parameter is to its second moments."""

    NONE = None  # not factored
    BATCH = 1  # each entry has its own statistics, as for stacked layers
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The rule that takes the largest dimension as columns and the second largest as rows."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token
# One FactorDim per dimension, the rule by sizes, or None if nothing is factored.
FactorRule = tuple[FactorDim, ...] | HeuristicRule | None


class Factoring(NamedTuple):
    """How the second moments of one parameter are stored.

    Attributes:
      rows, columns: the factored dimensions; both empty if the whole second moment is kept.
      averaged: the dimensions that root mean squares are taken over.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    averaged: tuple[int, ...]


class AdafactorState(NamedTuple):
    """The state, in trees with the structure of the parameters.

    The four statistics of a parameter are T5X's. What T5X's checkpoints call
    `state.param_states.<path>.v_row` is `v_row` at `<path>` here, and `state.step` is `step`. A
    statistic that a parameter does not have is a float32 zero of shape (1,) here as well.

    Attributes:
      step: the number of updates, an int32 scalar.
      m: the momentum, of the shape of the parameter; only if `beta1` is set.
      v: the second moment of an unfactored parameter, float32, of the shape of the parameter.
      v_col: its mean over the rows, float32: the batch and column dimensions, in their order.
      v_row: its mean over the columns, float32: the batch and row dimensions, in their order.
    """

    step: jax.Array
    m: Any
    v: Any
    v_col: Any
    v_row: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorSettings:
    """The settings of the update rule.

    Attributes:
      beta1: the decay of the momentum, or None for no momentum.
      decay_rate: the exponent of the decay of second moments.
      step_offset: the step from which that decay counts; earlier steps are like this one.
      clipping_threshold: the largest root mean square of an update, or None for no clipping.
      weight_decay_rate: the fraction of a weight that each update subtracts, or None.
      weight_decay_rate_lr_exponent: if set, this fraction is also multiplied by the learning rate
        to the power of this number, and is 1 if `weight_decay_rate` is None.
      global_norm_clip_threshold: the global norm that gradients are clipped to, or None.
      max_parameter_scale: the largest scale of a parameter, or None.
      epsilon1: the number added to squared gradients.
      epsilon2: the smallest scale of a parameter.
      skip_nan_updates: whether elements of parameters and statistics stay as they are where the
        update would make them NaN.
      dtype_momentum: the dtype of the momentum.
    """

    beta1: float | None = None
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float | None = 1.0
    weight_decay_rate: float | None = None
    weight_decay_rate_lr_exponent: float | None = None
    global_norm_clip_threshold: float | None = None
    max_parameter_scale: float | None = None
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    skip_nan_updates: bool = False
    dtype_momentum: Any = 'float32'


def make_adafactor(
    learning_rate: optax.Schedule | float,
    settings: AdafactorSettings,
    factoring: Callable[[str, tuple[int, ...]], Factoring],
    is_scaled: Callable[[str], bool],
) -> optax.GradientTransformation:
    """Returns the transformation, whose state is an `AdafactorState`.

    Args:
      learning_rate: a schedule (step -> rate) or a constant.
      factoring: how a parameter is factored, given its path, such as 'decoder/mlp/wi/kernel', and
        its shape.
      is_scaled: whether the updates of the parameter at a path are multiplied by its root mean
        square.
    """

    def init(params: Any) -> AdafactorState:
        treedef: Any  # the type that jax declares lacks flatten_up_to
        arrays, treedef = jax.tree.flatten(params)
        dtype = None if settings.beta1 is None else jnp.dtype(settings.dtype_momentum)
        states = [
            _init_statistics(x.shape, factoring(path, x.shape), dtype)
            for path, x in zip(_paths(params), arrays, strict=True)
        ]
        return AdafactorState(jnp.int32(0), *_by_statistic(states, treedef))

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        if params is None:
            raise ValueError('Adafactor needs the parameters: tx.update(grads, state, params)')
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        treedef: Any
        arrays, treedef = jax.tree.flatten(params)
        gradients: Sequence[Any] = treedef.flatten_up_to(grads)
        if settings.global_norm_clip_threshold is not None:
            threshold = settings.global_norm_clip_threshold
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
            factor = threshold * jnp.minimum(1.0 / threshold, 1.0 / norm)
            gradients = [g * factor for g in gradients]
        by_parameter = zip(*(treedef.flatten_up_to(tree) for tree in state[1:]), strict=True)
        updates, states = [], []
        for path, x, grad, old in zip(_paths(params), arrays, gradients, by_parameter, strict=True):
            scale = rate * (_scale(x, factoring(path, x.shape), settings) if is_scaled(path) else 1)
            change, new = _update_one(
                x, grad, dict(zip(STATISTICS, old, strict=True)), factoring(path, x.shape),
                count=state.step, rate=rate, scale=scale, settings=settings,
            )  # fmt: skip
            updates.append(change)
            states.append(new)
        new_state = AdafactorState(state.step + 1, *_by_statistic(states, treedef))
        return treedef.unflatten(updates), new_state

    return optax.GradientTransformation(init, update)


STATISTICS = AdafactorState._fields[1:]


def _paths(params: Any) -> list[str]:
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_carrier)
    return [path_str(path) for path, _ in flat]


def _by_statistic(states: Sequence[Mapping[str, jax.Array]], treedef: Any) -> list[Any]:
    """One tree per statistic, of the statistics of each parameter."""
    return [treedef.unflatten([state[name] for state in states]) for name in STATISTICS]


def _init_statistics(
    shape: tuple[int, ...], factoring: Factoring, momentum: Any
) -> dict[str, jax.Array]:
    found = {name: jnp.zeros((1,), jnp.float32) for name in STATISTICS}
    if factoring.rows:
        for name, reduced in (('v_row', factoring.columns), ('v_col', factoring.rows)):
            kept = [size for dim, size in enumerate(shape) if dim not in reduced]
            found[name] = jnp.zeros(kept, jnp.float32)
    else:
        found['v'] = jnp.zeros(shape, jnp.float32)
    if momentum is not None:
        found['m'] = jnp.zeros(shape, momentum)
    return found


def _scale(param: jax.Array, factoring: Factoring, settings: AdafactorSettings) -> jax.Array:
    """The root mean square of a parameter, within the bounds of the settings."""
    scale = jnp.maximum(_rms(param, factoring.averaged), settings.epsilon2)
    if settings.max_parameter_scale is not None:
        scale = jnp.minimum(scale, settings.max_parameter_scale)
    return scale


def _update_one(
    param: jax.Array,
    grad: jax.Array,
    old: Mapping[str, jax.Array],
    factoring: Factoring,
    *,
    count: jax.Array,
    rate: Any,
    scale: Any,
    settings: AdafactorSettings,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns what is added to a parameter, and its new statistics."""
    new = {name: jnp.zeros((1,), jnp.float32) for name in STATISTICS}
    age = jnp.maximum(jnp.float32(count - settings.step_offset) + 1.0, 1.0)
    decay = 1.0 - age**-settings.decay_rate
    grad = grad.astype(jnp.float32)
    squares = grad * grad + settings.epsilon1

    def mean(name: str, value: jax.Array) -> jax.Array:
        new[name] = decay * old[name] + (1.0 - decay) * value
        return new[name]

    rows, columns = factoring.rows, factoring.columns
    if rows:
        v_row = jnp.expand_dims(mean('v_row', squares.mean(columns)), columns)
        v_col = jnp.expand_dims(mean('v_col', squares.mean(rows)), rows)
        step = grad * (v_row / v_row.mean(rows, keepdims=True)) ** -0.5 * v_col**-0.5
    else:
        step = grad * mean('v', squares) ** -0.5
    if (threshold := settings.clipping_threshold) is not None:
        step = step / jnp.maximum(1.0, _rms(step, factoring.averaged) / threshold)
    step = scale * step
    if settings.beta1 is not None:
        step = settings.beta1 * old['m'] + (1.0 - settings.beta1) * step
        new['m'] = step.astype(old['m'].dtype)
    change, weight_decay = -step, settings.weight_decay_rate
    if exponent := settings.weight_decay_rate_lr_exponent:
        weight_decay = (weight_decay or 1.0) * rate**exponent
    if weight_decay is not None:
        change = change - weight_decay * param
    if settings.skip_nan_updates:
        new = {name: jnp.where(jnp.isnan(x), old[name], x) for name, x in new.items()}
        change = jnp.where(jnp.isnan(change), 0.0, change)
    return change, new


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(x * x, axis=dims, keepdims=True))


def factor_dimensions(
    path: str, shape: tuple[int, ...], rule: FactorRule, min_dim_size_to_factor: int
) -> Factoring:
    """Returns how a parameter is factored.

    Arrays of rank 0 to 2 without a batch dimension are always factored by their sizes, if they have
    a rule at all, and only if both dimensions are large enough. All others are factored as their
    rule says, whatever their sizes. Raises a ConfigError if an array of higher rank has no rule for
    its dimensions, or if its rule does not fit.
    """
    rank = len(shape)
    every = tuple(range(rank))
    if rule is None:
        return Factoring((), (), every)
    setting = 'adafactor.Adafactor.logical_factor_rules'
    if isinstance(rule, HeuristicRule):
        if rank > 2:
            raise ConfigError(
                f'{path} of shape {shape} has more than two dimensions, so Adafactor must know '
                f'which are rows and columns: set {setting} = '
                '@adafactor.standard_logical_factor_rules(), and name its logical axes'
            )
        return _by_size(shape, min_dim_size_to_factor)
    if len(rule) != rank:
        raise ConfigError(f'{path}: the factor rule {_names(rule)} does not fit the shape {shape}')
    dims = {kind: tuple(d for d in every if rule[d] is kind) for kind in FactorDim}
    if rank <= 2 and not dims[FactorDim.BATCH]:
        return _by_size(shape, min_dim_size_to_factor)
    rows, columns = dims[FactorDim.ROW], dims[FactorDim.COLUMN]
    if bool(rows) != bool(columns):
        raise ConfigError(
            f'{path}: the factor rule {_names(rule)} needs a row and a column, or neither'
        )
    averaged = tuple(d for d in every if d not in dims[FactorDim.BATCH])
    return Factoring(rows, columns, averaged)


def _by_size(shape: tuple[int, ...], min_size: int) -> Factoring:
    every = tuple(range(len(shape)))
    if len(shape) < 2 or min(shape) < min_size:
        return Factoring((), (), every)
    row, column = map(int, np.argsort(shape, kind='stable'))
    return Factoring((row,), (column,), every)


def rule_by_axes(
    path: str, axes: Sequence[str | None], rules: Mapping[str, FactorDim]
) -> tuple[FactorDim, ...]:
    """Returns what each dimension of a parameter is by the names of its dimensions.

    Without both a row and a column, nothing but the batch dimensions counts. Raises a ConfigError
    if a name is not in the rules, or if some dimensions are rows or columns and others neither.
    """
    unknown = [name for name in axes if name is not None and name not in rules]
    if unknown:
        raise ConfigError(
            f'{path}: adafactor.Adafactor.logical_factor_rules has no entry for the logical axis '
            f'{unknown[0]!r}.{nearest(unknown[0], rules)} Add it as row, column, batch or none'
        )
    rule = tuple(FactorDim.NONE if name is None else rules[name] for name in axes)
    if {FactorDim.ROW, FactorDim.COLUMN} <= {*rule}:
        if FactorDim.NONE in rule:
            raise ConfigError(
                f'{path}: its logical axes {tuple(axes)} are {_names(rule)}: all of them must be '
                'row, column or batch; change adafactor.Adafactor.logical_factor_rules'
            )
        return rule
    return tuple(kind if kind is FactorDim.BATCH else FactorDim.NONE for kind in rule)


def _names(rule: tuple[FactorDim, ...]) -> tuple[str, ...]:
    return tuple(kind.name.lower() for kind in rule)
