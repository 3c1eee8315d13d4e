"""Optimizers: optax transformations with learning rates, clipping, labels and masks."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from partitioning.state import path_str, walk
from partitioning.state.boxes import array_of, is_carrier
from partitioning.state.traversal import Leaf
from train.errors import ConfigError, check_number

# The logical axes of dimensions that stack the arrays of several layers.
STACKED_AXES = ('layers', 'stack', 'stage')

# The path of each parameter -> the names of its dimensions.
LogicalAxes = Mapping[str, tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optax transformation with a learning rate and gradient clipping.

    Attributes:
      transform: a function that takes `learning_rate` and returns an optax transformation, such as
        `optax.adamw`. If it takes `logical_axes` as well, it receives the names of the dimensions
        of each parameter by path, such as {'decoder/mlp/wi/kernel': ('embed', 'mlp')}.
      learning_rate: a schedule (step -> rate) or a constant.
      clip_norm: the global norm that gradients are clipped to. None disables clipping.
    """

    transform: Callable[..., optax.GradientTransformation]
    learning_rate: optax.Schedule | float
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        known = inspect.signature(self.transform).parameters if callable(self.transform) else {}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        if not takes_any and 'learning_rate' not in known:
            raise ConfigError(
                f'Optimizer.transform is {self.transform!r}: it must be a function that takes '
                'learning_rate. In a gin file, write @optax.adamw, without parentheses. Use a '
                'transformation without a learning rate in place of the Optimizer'
            )
        if not isinstance(self.learning_rate, float | int) and not _is_schedule(self.learning_rate):
            raise ConfigError(
                f'Optimizer.learning_rate is {self.learning_rate!r}: it must be a number or a '
                'schedule. In a gin file, write @optax.warmup_cosine_decay_schedule(), with '
                'parentheses'
            )
        check_number('Optimizer.clip_norm', self.clip_norm, '(0, inf] or None')

    def build(self, logical_axes: LogicalAxes | None = None) -> optax.GradientTransformation:
        """Returns the optax transformation, including clipping.

        Args:
          logical_axes: the names of the dimensions of each parameter, by path.
        """
        settings: dict[str, Any] = {'learning_rate': self.learning_rate}
        if 'logical_axes' in inspect.signature(self.transform).parameters:
            settings['logical_axes'] = logical_axes or {}
        update = self.transform(**settings)
        if self.clip_norm is None:
            return update
        return optax.chain(_clip_by_global_norm(self.clip_norm), update)

    def rate(self, step: jax.Array) -> jax.Array:
        """Returns the learning rate at a step."""
        rate = self.learning_rate
        return rate(step) if callable(rate) else jnp.float32(rate)


def global_norm(tree: Any) -> jax.Array:
    """Returns the norm of all values of a tree, computed in float32."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Like `optax.clip_by_global_norm`, but computes the norm in float32."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)

        def clip(x: jax.Array) -> jax.Array:
            return jnp.where(norm < max_norm, x, (x / norm.astype(x.dtype)) * max_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def as_transformation(
    optimizer: Optimizer | optax.GradientTransformation,
    variables: Any = None,
    overrides: Sequence[tuple[str, Sequence[str | None]]] = (),
) -> optax.GradientTransformation:
    """Returns the optax transformation of an optimizer.

    Args:
      optimizer: an `Optimizer` or any optax transformation.
      variables: the variables of the model, or only its parameters, with their logical axes. From
        these, `decay_matrices_only` recognizes stacked layers, and an `Optimizer.transform` that
        takes `logical_axes` receives them.
      overrides: the path rules of a partitioner that name parameters.

    Raises:
      ConfigError: if `optimizer` is neither an `Optimizer` nor an optax transformation.
    """
    axes = logical_axes_of(variables, overrides)
    tx = optimizer.build(axes) if isinstance(optimizer, Optimizer) else optimizer
    _check_transformation('optimizer', tx)
    tx = optax.with_extra_args_support(tx)
    stacked = {path: sum(n in STACKED_AXES for n in names) for path, names in axes.items()}
    return optax.GradientTransformationExtraArgs(
        _run_with(stacked, tx.init), _run_with(stacked, tx.update)
    )


def logical_axes_of(
    variables: Any, overrides: Sequence[tuple[str, Sequence[str | None]]] = ()
) -> LogicalAxes:
    """Returns the names of the dimensions of each parameter, by path; {} if none has names.

    Args:
      variables: as for `as_transformation`. Names come from boxes, or from T5X's 'params_axes'.
      overrides: path rules that name parameters.
    """
    whole = isinstance(variables, Mapping) and 'params' in variables
    params = {'params': variables['params'] if whole else variables}
    if whole and 'params_axes' in variables:
        params['params_axes'] = variables['params_axes']
    try:
        leaves = walk(params, overrides, report=lambda *_: None).leaves
    except ValueError:  # no array has names
        return {}
    named = [leaf for leaf in leaves if isinstance(leaf, Leaf) and leaf.role == 'parameters']
    return {'/'.join(leaf.path[1:]): tuple(leaf.names) for leaf in named}


def learning_rate_of(
    optimizer: Optimizer | optax.GradientTransformation, opt_state: Any, step: jax.Array
) -> jax.Array | None:
    """Returns the learning rate of an update, for reports, or None if it cannot be read.

    Args:
      optimizer: the optimizer of the run.
      opt_state: its state after the update. The schedule of an `Optimizer` follows the count of
        updates in this state, which skipped steps do not raise. For other transformations, the rate
        is read from `optax.inject_hyperparams`, if exactly one of them has a 'learning_rate'.
      step: the number of steps before this one, used if the state counts no updates.
    """
    if isinstance(optimizer, Optimizer):
        counts = [
            x
            for path, x in jax.tree_util.tree_leaves_with_path(opt_state)
            if path_str(path[-1:]) in ('count', 'step') and (x.shape, x.dtype) == ((), jnp.int32)
        ]
        return optimizer.rate(functools.reduce(jnp.maximum, counts) - 1 if counts else step)
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    rates = [x for path, x in leaves if path_str(path[-2:]) == 'hyperparams/learning_rate']
    return rates[0] if len(rates) == 1 else None


def share_of(total: int, share: float) -> int:
    """Returns `share` of `total` steps, rounded down, for example the steps of a warmup."""
    return int(total * share)


def chain(transformations: Sequence[optax.GradientTransformation]) -> optax.GradientTransformation:
    """Returns `optax.chain(*transformations)`. gin can set a list, but not `*args`.

    Raises:
      ConfigError: if an entry is not an optax transformation.
    """
    for i, entry in enumerate(transformations):
        _check_transformation(f'chain.transformations[{i}]', entry)
    return optax.chain(*transformations)


def _check_transformation(setting: str, value: Any) -> None:
    if not isinstance(value, optax.GradientTransformation):
        raise ConfigError(
            f'{setting} is {value!r}: it must be an optax transformation. In a gin file, write '
            '@optax.adamw(), with parentheses'
        )


def label_by_path(rules: Sequence[tuple[str, str]]) -> Callable[[Any], Any]:
    """Returns a function for `optax.multi_transform` that labels each parameter by its path.

    Usage in a gin file:
      optax.multi_transform.transforms = {'vectors': @optax.adamw(), 'rest': @optax.contrib.muon()}
      optax.multi_transform.param_labels = @label_by_path()
      label_by_path.rules = [('scale$|embedding', 'vectors'), ('.*', 'rest')]

    Args:
      rules: (regular expression, label) pairs. The first expression that occurs in the path of a
        parameter, such as 'layers/mlp/up', chooses its label.

    Raises:
      ConfigError: if no rule matches a parameter, or if a rule chooses no label.
    """

    def label(params: Any) -> Any:
        chosen = set()

        def choose(path: Any, _: Any) -> str:
            text = path_str(path)
            for i, (pattern, name) in enumerate(rules):
                if re.search(pattern, text):
                    chosen.add(i)
                    return name
            raise ConfigError(
                f'label_by_path.rules: no rule matches {text!r}: add a last rule, such as '
                f"('.*', {rules[-1][1]!r})"
            )

        labels = jax.tree_util.tree_map_with_path(choose, params, is_leaf=is_carrier)
        for i in set(range(len(rules))) - chosen:
            raise ConfigError(
                f'label_by_path.rules: {tuple(rules[i])!r} chooses no label: its expression occurs '
                'in no path, or earlier rules match the same paths; correct or remove it'
            )
        return labels

    return label


_STACKED: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar('_STACKED')


def decay_matrices_only(params: Any) -> Any:
    """Returns a weight-decay mask: True for arrays of rank 2 or higher, whatever their names.

    A dimension that stacks layers (`STACKED_AXES`) does not count. It is recognized only if the
    parameters have logical axes, and only inside a transformation from `as_transformation`.
    """
    stacked = _STACKED.get({})
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ndim(array_of(x)) - stacked.get(path_str(path), 0) >= 2,
        params,
        is_leaf=is_carrier,
    )


def matrices_for_muon(params: Any, adam: str = 'embedding|output') -> Any:
    """Returns the row and column dimensions of each parameter, for `optax.contrib.muon`.

    By default, muon updates only matrices. With this function, it takes arrays of higher rank as
    matrices that are as square as possible, such as [embed, heads x kv] for [embed, heads, kv].
    Stacked layers (see `decay_matrices_only`) are separate matrices.

    Args:
      params: the parameters.
      adam: a regular expression. Arrays whose path it matches are updated by Adam, as vectors are.
    """
    stacked = _STACKED.get({})

    def split(path: Any, x: Any) -> optax.contrib.MuonDimensionNumbers | None:
        text, shape = path_str(path), jnp.shape(array_of(x))
        first, last = stacked.get(text, 0), len(shape)
        if last - first < 2 or re.search(adam, text):
            return None
        ratios = {
            i: math.prod(shape[first:i]) / math.prod(shape[i:]) for i in range(first + 1, last)
        }
        middle = min(ratios, key=lambda i: abs(math.log(ratios[i])))
        return optax.contrib.MuonDimensionNumbers((*range(first, middle),), (*range(middle, last),))

    return jax.tree_util.tree_map_with_path(split, params, is_leaf=is_carrier)


def _run_with(stacked: Mapping[str, int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, changed so that masks inside it know the stacked dimensions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        context = contextvars.copy_context()
        context.run(_STACKED.set, stacked)
        return context.run(function, *args, **kwargs)

    return call


def _is_schedule(rate: Any) -> bool:
    """Whether `rate` is a function from a step to a number."""
    step = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        return callable(rate) and jax.eval_shape(rate, step).shape == ()
    except TypeError:
        return False
