"""T5X's `optimizers`: optax by T5X's names, and different optimizers for parts of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import optax

from partitioning.state import path_str
from train.errors import ConfigError
from train.optimizers import LogicalAxes, Optimizer, chain as chain
from train.t5x.adafactor import Adafactor
from train.t5x.refusals import refusal

Make = TypeVar('Make', bound=Callable[..., optax.GradientTransformation])


def wrap_optax_optimizer(optax_optimizer: Make) -> Make:
    """Returns the function itself: optax transformations are optimizers here."""
    return optax_optimizer


# T5X's names of optax's optimizers. They have their own learning rates.
adabelief = optax.adabelief
adagrad = optax.adagrad
adam = optax.adam
adamw = optax.adamw
dpsgd = optax.contrib.dpsgd
fromage = optax.fromage
lamb = optax.lamb
lars = optax.lars
lion = optax.lion
noisy_sgd = optax.noisy_sgd
radam = optax.radam
rmsprop = optax.rmsprop
sgd = optax.sgd
yogi = optax.yogi


@dataclasses.dataclass(frozen=True)
class MultiOptimizer:
    """Updates each part of the parameters by its own optimizer.

    Parameters that no traversal selects stay as they are.

    Attributes:
      traversals_and_optimizers: (traversal, optimizer) pairs. A traversal is a
        `flax.traverse_util.ModelParamTraversal`, or a regular expression that occurs in the paths
        of its parameters, such as 'layers_0/mlp'. An `Adafactor` gets the learning rate of the
        trainer; an optax transformation has its own.
    """

    traversals_and_optimizers: Sequence[tuple[Any, Any]]

    def __post_init__(self) -> None:
        key = 'optimizers.MultiOptimizer.traversals_and_optimizers'
        for i, pair in enumerate(self.traversals_and_optimizers):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise refusal(f'{key}[{i}]', pair, 'write (traversal, optimizer)')
            if not isinstance(pair[0], str) and not hasattr(pair[0], 'iterate'):
                why = 'write a regular expression, or a flax.traverse_util.ModelParamTraversal'
                raise refusal(f'{key}[{i}][0]', pair[0], why)
            check_optimizer(f'{key}[{i}][1]', pair[1])

    def optimizer(self, learning_rate: optax.Schedule) -> Optimizer:
        """The trainer's optimizer, with this learning rate for every Adafactor."""
        return Optimizer(transform=self.transform, learning_rate=learning_rate, clip_norm=None)

    def transform(
        self, learning_rate: optax.Schedule | float, logical_axes: LogicalAxes
    ) -> optax.GradientTransformation:
        """The optax transformation, given the names of the dimensions of each parameter."""
        parts: dict[str, optax.GradientTransformation] = {}
        for i, (_, part) in enumerate(self.traversals_and_optimizers):
            optimizer = with_learning_rate(part, learning_rate)
            is_built = not isinstance(optimizer, Optimizer)
            parts[str(i)] = optimizer if is_built else optimizer.build(logical_axes)
        return optax.multi_transform({**parts, 'none': optax.set_to_zero()}, self._labels)

    def _labels(self, params: Any) -> Any:
        """The label of the optimizer of each parameter.

        Raises a ConfigError if several traversals select a parameter, or a traversal selects none.
        """
        # New objects, by which the parameters that a traversal yields are found again.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        treedef: Any
        flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
        labels = {id(x): 'none' for _, x in flat}
        paths = {id(x): path_str(path) for path, x in flat}
        key = 'optimizers.MultiOptimizer.traversals_and_optimizers'
        for i, (traversal, _) in enumerate(self.traversals_and_optimizers):
            if isinstance(traversal, str):
                selected = [id(x) for _, x in flat if re.search(traversal, paths[id(x)])]
            else:
                selected = [id(x) for x in traversal.iterate(shapes)]
            if not selected:
                raise ConfigError(f'{key}[{i}][0] selects no parameter: correct or remove it')
            for one in selected:
                if labels[one] != 'none':
                    raise ConfigError(
                        f'{key}[{labels[one]}] and [{i}] both select {paths[one]}: change one'
                    )
                labels[one] = str(i)
        return treedef.unflatten([labels[id(x)] for _, x in flat])


OptimizerDef: TypeAlias = Adafactor | MultiOptimizer | Optimizer | optax.GradientTransformation


def check_optimizer(key: str, value: Any) -> None:
    """Checks that a setting is an optimizer; `key` is its name in a gin file.

    Raises a ConfigError if it is not, for example if it is a function of optax without parentheses.
    """
    kinds = (Adafactor, MultiOptimizer, Optimizer, optax.GradientTransformation)
    if not isinstance(value, kinds):
        raise refusal(key, value, 'write @adafactor.Adafactor(), with the parentheses')


def with_learning_rate(
    optimizer_def: OptimizerDef, learning_rate: optax.Schedule | float
) -> Optimizer | optax.GradientTransformation:
    """Returns an optimizer with the learning rate of the trainer, unless it has its own."""
    if isinstance(optimizer_def, Adafactor | MultiOptimizer):
        return optimizer_def.optimizer(learning_rate)
    return optimizer_def
