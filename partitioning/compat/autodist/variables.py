"""The variables of a model as AutoDist's planners see them: name, shape, type, bytes, sparsity."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.compat.pytorch.trees import parameters
from partitioning.rules import nearest
from partitioning.state import shape_of
from partitioning.state.boxes import array_of


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable of a model.

    Attributes:
      name: its path, 'fc1/kernel'.
      shape: global shape.
      dtype: its type, 'float32'.
      sparse: whether its gradient is of a few rows, as that of an embedding table. (In jax all
        gradients are dense arrays; the word decides what planners do with the variable.)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = 'float32'
    sparse: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, 'shape', tuple(int(size) for size in self.shape))
        object.__setattr__(self, 'dtype', str(jnp.dtype(self.dtype)))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def describe_variables(params: Any, sparse: Sequence[str] = ()) -> tuple[Variable, ...]:
    """The variables of a tree of parameters, in the order of the tree.

    jax sorts the keys of a dict; a collections.OrderedDict keeps the order of creation.

    Args:
      params: a pytree of arrays or ShapeDtypeStructs, in linen boxes or nnx variables or without;
        linen variables with a collection 'params'; an nnx module.
      sparse: paths, or regular expressions of whole paths, of variables with sparse gradients.

    Raises:
      ValueError: no variables; an entry of `sparse` that is no regular expression or names none.
    """
    arrays = {'/'.join(path): array_of(x) for path, x in parameters(params).items()}
    declared = _named(sparse, arrays)
    return tuple(
        Variable(name, shape_of(array), str(jnp.result_type(array)), name in declared)
        for name, array in arrays.items()
    )


def given_variables(x: Any) -> tuple[Variable, ...] | None:
    """The `Variable`s of a sequence or an iterator of them; None of a tree of parameters.

    Raises:
      TypeError: a Variable alone, or in anything else; an iterator of anything else.
      ValueError: an iterator of nothing.
    """
    once = isinstance(x, Iterator | ValuesView)
    held = tuple(x) if once else x
    found = [isinstance(leaf, Variable) for leaf in jax.tree.leaves(held)]
    if not any(found) and not once:
        return None
    if once and not held:
        raise ValueError('there are no variables: the iterator is at its end')
    if isinstance(held, list | tuple) and all(isinstance(v, Variable) for v in held):
        return tuple(held)
    raise TypeError(
        f'{sum(found)} of the {len(found)} leaves of a {type(x).__name__} are Variables: give a '
        'list, [Variable(...), ...], or a pytree of parameters without any'
    )


def _named(patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """The names that any of the patterns is or matches."""
    if isinstance(patterns, str):
        raise ValueError(f'sparse={patterns!r} must be a list of paths: write [{patterns!r}]')
    known, found = list(names), set()
    for pattern in patterns:
        try:
            matched = [n for n in known if n == pattern or re.fullmatch(pattern, n)]
        except re.error as error:
            raise ValueError(f'sparse: {pattern!r} is no regular expression: {error}') from error
        if not matched:
            raise ValueError(f'sparse: {pattern!r} matches no variable.{nearest(pattern, known)}')
        found.update(matched)
    return frozenset(found)
