"""What is wrong with the arguments of a call themselves, whatever their layouts.

Each function yields one message per problem, which names the argument and the array in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from partitioning.programs.boundary import Argument, Boundary
from partitioning.programs.tree_matching import TreeMismatchError, short_repr


def entry_problems(boundary: Boundary, args: Sequence[Any]) -> Iterator[str]:
    """There must be an entry for each positional argument that is not static."""
    if not isinstance(boundary.in_shardings, tuple):
        return
    names = [boundary.arguments.name(i) for i in boundary.dynamic_indices(len(args))]
    count = len(boundary.in_shardings)
    if count < len(names):
        yield (
            f'in_axis_resources has {_count_str(count)}, but {len(names)} positional arguments '
            f'were passed: {", ".join(names)}. Add an entry for {", ".join(names[count:])} (None '
            'replicates it)'
        )
    elif count > len(names):
        passed = f'only {", ".join(names)}' if names else 'no argument'
        yield (
            f'in_axis_resources has {_count_str(count)}, but {passed} was passed: pass an argument '
            'for each entry, also where it has a default'
        )


def static_problems(boundary: Boundary, args: Sequence[Any]) -> Iterator[str]:
    """Static arguments must be hashable."""
    for i in boundary.static:
        if i >= len(args):
            continue
        try:
            hash(args[i])
        except TypeError:
            yield (
                f'the static argument {boundary.arguments.name(i)} is a {type(args[i]).__name__}, '
                'which is not hashable: pass a tuple or a frozen dataclass, or an array that is '
                'not static'
            )


def value_problems(name: str, index: int | None, value: Any, abstract: bool) -> Iterator[str]:
    """Every leaf of an argument must be a number or an array.

    Args:
      name: the name of the argument.
      index: its position, if it was passed by position.
      value: the argument.
      abstract: whether ShapeDtypeStructs are allowed too.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        where = f'{name}{jax.tree_util.keystr(path)}'
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if not abstract:
                yield f'{where} is a ShapeDtypeStruct, which has no data: pass an array'
            continue
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in 'OSUMm':
            yield (
                f'{where} is a numpy array of dtype {leaf.dtype}: remove it from {name}, or '
                "convert it to numbers, such as x.astype('float32')"
            )
            continue
        try:
            jax.typeof(leaf)
        except OverflowError:
            yield (
                f'{where} is {leaf}, which int32 cannot hold: pass a float or a smaller number, or '
                "set jax.config.update('jax_enable_x64', True)"
            )
        except TypeError:
            out = f'make it static with static_argnums={index}'
            out = out if index is not None and not path else f'remove it from {name}'
            yield (
                f'{where} is a {type(leaf).__name__}, {short_repr(leaf)}: a partitioned function '
                f'takes arrays and numbers; convert it with numpy.asarray, or {out}'
            )


def static_field_problems(arguments: Sequence[Argument]) -> Iterator[str]:
    """An argument that is passed by name must have the static fields of its entry."""
    for argument in arguments:
        try:
            for _ in argument.pairs(static_fields=True):
                pass
        except TreeMismatchError as error:
            yield (
                f'{argument.name}{jax.tree_util.keystr(error.path)}: the entry in '
                f'in_axis_resources has {error.first}, but the argument has {error.second}: pass '
                'every argument by position'
            )


def _count_str(count: int) -> str:
    """A number of entries in a sentence."""
    return f'{count} entry' if count == 1 else f'{count} entries'
