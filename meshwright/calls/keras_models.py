"""Reads the paths of variables and the layout map of a Keras program.

Nothing is imported from Keras here: a program that uses it has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from meshwright.jax_private import TracedCall

_LISTS = ('trainable_variables', 'non_trainable_variables')


def variables_of(owner: Any) -> list[tuple[str, Any]] | None:
    """The path and the variable of each weight of a Keras model, layer or list of variables.

    Returns:
      None if it is something else.
    """
    variables = getattr(owner, 'variables', owner)
    if not isinstance(variables, list | tuple) or not variables:
        return None
    if not all(
        isinstance(getattr(v, 'path', None), str) and hasattr(v, 'shape') for v in variables
    ):
        return None
    return [(v.path, v) for v in variables]


def layout_map_in_use() -> Any | None:
    """The layout map of the distribution that Keras uses now, or None."""
    keras = sys.modules.get('keras')
    try:
        used = keras.distribution.distribution()  # type: ignore[union-attr]
    except AttributeError:  # Keras is not loaded, or not wholly
        return None
    return getattr(used, '_layout_map', None)


def state_paths(
    trainer: Any, paths: Sequence[tuple[str, ...]], traced: TracedCall
) -> list[tuple[str, ...]] | None:
    """The paths of arrays in the state of a Keras trainer's step, by the paths of its variables.

    A step takes lists of arrays, 'state[0][3]': the trainable variables, the others, and those of
    the optimizer and the metrics, if it has them. They become 'state/dense/kernel'.

    Args:
      trainer: a Keras model.
      paths: the path of each array of the step by its place.
      traced: the step.

    Returns:
      None if the trainer has other arrays.
    """
    groups = [list(getattr(trainer, name, ())) for name in _LISTS]
    optimizer = list(getattr(getattr(trainer, 'optimizer', None), 'variables', ()))
    metrics = list(getattr(trainer, 'metrics_variables', ()))
    if not all(isinstance(getattr(v, 'path', None), str) for v in groups[0]) or not groups[0]:
        return None
    shapes = [tuple(aval.shape) for aval in traced.jaxpr.in_avals]
    for own, rest in ((optimizer, metrics), ([], metrics), ([], [])):
        known = [*groups[0], *groups[1], *own, *rest]
        if [tuple(v.shape) for v in known] == shapes[: len(known)]:
            first = [path[:1] for path in paths[: len(known)]]
            if len(set(first)) > 1:
                return None
            of_optimizer = range(len(known) - len(own) - len(rest), len(known) - len(rest))
            named = [
                (*argument, *(('optimizer',) if i in of_optimizer else ()), *_parts(v.path))
                for i, (argument, v) in enumerate(zip(first, known, strict=True))
            ]
            return [*named, *paths[len(known) :]]
    return None


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split('/') if part)
