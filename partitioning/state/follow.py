"""Finds the parameter that a leaf of an optimizer state belongs to, and matches their dimensions.

optax keeps one tree with the structure of the parameters for each statistic. So the path of a
statistic ends with the path of its parameter, or has one more key (SM3 keeps a list per parameter).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partitioning.rules import Problem, ProblemError
from partitioning.state.boxes import Parameter, Path

# The logical axes that stack the arrays of several layers.
_STACKED_AXES = frozenset({'layers', 'stack', 'stage', 'expert'})

# For each dimension of a leaf, the index of the matching dimension of its parameter, or None.
Dims = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a state, looked up by the last keys of a path.

    Attributes:
      by_path: for each path inside a tree, the parameters with this path; several trees can have
        one. If the state has only one parameter, the empty path has it too.
    """

    by_path: Mapping[Path, Sequence[Parameter]]

    @functools.cached_property
    def _lengths(self) -> list[int]:
        """The lengths of the paths, the longest first."""
        return sorted({len(path) for path in self.by_path} - {0}, reverse=True)

    @functools.cached_property
    def _by_suffix(self) -> dict[Path, list[Parameter]]:
        """The parameters by each proper suffix of their paths."""
        found: dict[Path, list[Parameter]] = {}
        for path, parameters in self.by_path.items():
            for start in range(1, len(path)):
                found.setdefault(path[start:], []).extend(parameters)
        return found

    def follow(self, path: Path, shape: tuple[int, ...]) -> tuple[Parameter | None, Dims]:
        """Finds the parameter that a leaf belongs to, and matches the dimensions of both.

        The second result has, for each dimension of the leaf, the index of the matching dimension
        of the parameter, or None. It is a ProblemError if the path of the leaf ends with the path
        of a parameter but their shapes do not match, or if the leaf may belong to several
        parameters with different layouts.
        """
        no_dims = (None,) * len(shape)
        if 0 in shape or not shape:
            return None, no_dims
        candidates = []
        for length in self._lengths:
            if (parameters := self.by_path.get(path[-length:])) is not None:
                if same := [p for p in parameters if p.shape == shape]:
                    return _nearest_path(path, same), tuple(range(len(shape)))
                candidates.append(parameters)
        if path[-1].isdecimal() and (owner := self._listed(path, int(path[-1]), shape)):
            return owner, (int(path[-1]),)
        factored = 'v_row' if 'v_row' in path else 'v_col' if 'v_col' in path else None
        for parameters in candidates:
            derived = [p for p in parameters if _match_dims(shape, p.shape or (), factored)]
            if derived:
                owner = _nearest_path(path, derived)
                whole, stacked = owner.shape or (), None
                if factored and not _STACKED_AXES.isdisjoint(owner.names):
                    stacked = _stacked_kept(shape, whole, owner.names)
                return owner, stacked or _match_dims(shape, whole, factored) or no_dims
        if candidates:
            parameter = candidates[0][0]
            message = (
                f'its shape {shape} cannot be derived from the shape {parameter.shape} of its '
                f'parameter {"/".join(parameter.path)}, so its layout is unknown; {_FIX}'
            )
            raise ProblemError(Problem('names', message))
        return self._by_partial_path(path, shape, factored) or (None, no_dims)

    def _listed(self, path: Path, dim: int, shape: tuple[int, ...]) -> Parameter | None:
        """The parameter of entry `dim` of a list with one statistic per dimension, as in SM3."""
        for length in self._lengths:
            for p in self.by_path.get(path[-1 - length : -1], ()):
                if p.shape is not None and p.shape[dim : dim + 1] == shape:
                    return p
        return None

    def _by_partial_path(
        self, path: Path, shape: tuple[int, ...], factored: str | None
    ) -> tuple[Parameter, Dims] | None:
        """The only parameter that fits, if the optimizer got a subtree or a single array."""
        for start in range(len(path) + 1):
            candidates = (self._by_suffix if path[start:] else self.by_path).get(path[start:], ())
            for fits in (
                [p for p in candidates if p.shape == shape],
                [p for p in candidates if p.shape is not None and shape[1:] == p.shape],
                [p for p in candidates if factored and _match_dims(shape, p.shape or (), factored)],
            ):
                if not fits:
                    continue
                try:
                    owner = _nearest_path(path, fits)
                except ProblemError:
                    return None
                return owner, _match_dims(shape, owner.shape or (), factored) or ()
        return None


def _nearest_path(path: Path, parameters: Sequence[Parameter]) -> Parameter:
    """The parameter whose path shares the most keys with the path of a leaf."""
    if len(parameters) == 1:
        return parameters[0]
    common = [len({*p.path} & {*path}) for p in parameters]
    best = [p for p, n in zip(parameters, common, strict=True) if n == max(common)]
    if len({p[1:] for p in best}) > 1:
        one, other = ('/'.join(p.path) for p in best[:2])
        message = f'it may belong to {one} or to {other}, whose axes differ; {_FIX}'
        raise ProblemError(Problem('names', message))
    return best[0]


_FIX = (
    'put it in a flax.linen.LogicallyPartitioned with its own names, or name it in '
    'AxisRules(names=...)'
)


@functools.lru_cache(maxsize=4096)
def _match_dims(
    shape: tuple[int, ...], parameter: tuple[int, ...], factored: str | None
) -> Dims | None:
    """Matches the dimensions of a leaf and of its parameter, by the shapes of both.

    The result is None if the shape of the leaf cannot be derived from the parameter's.
    `factored` is 'v_row' or 'v_col' if the path of the leaf contains this key.
    """
    whole = tuple(range(len(parameter)))
    if shape == parameter:
        return whole
    if shape == (1,):  # factored optimizers keep this in place of a statistic they do not use
        return (None,)
    if shape[1:] == parameter:  # a history of the parameter, as in L-BFGS
        return (None, *whole)
    kept = _kept_dimensions(shape, parameter, factored == 'v_col')
    return kept or _dimensions_of_size(shape, parameter)


def _kept_dimensions(
    shape: tuple[int, ...], parameter: tuple[int, ...], columns: bool
) -> Dims | None:
    """The dimensions of the parameter that a factored statistic keeps: all but one.

    optax's Adafactor drops the largest dimension for rows and the second largest for columns. Of
    two equal dimensions the later one counts as larger (numpy.argsort).
    """
    rank = len(parameter)
    if len(shape) != rank - 1 or not shape:
        return None
    order = np.argsort(parameter)
    first = order[-2] if columns else order[-1]
    for dropped in [int(first), *range(rank)]:
        if (*parameter[:dropped], *parameter[dropped + 1 :]) == shape:
            return tuple(d for d in range(rank) if d != dropped)
    return None


def _stacked_kept(
    shape: tuple[int, ...], parameter: tuple[int, ...], names: tuple[Any, ...]
) -> Dims | None:
    """The dimensions that a factored statistic keeps, if the parameter stacks layers.

    Sizes alone cannot tell 12 layers from 12 heads, but statistics are never taken over layers.
    """
    if len(names) != len(parameter):
        return None
    stacked = [d for d, name in enumerate(names) if name in _STACKED_AXES]
    for dims in itertools.combinations(range(len(parameter)), len(shape)):
        if {*stacked} <= {*dims} and tuple(parameter[d] for d in dims) == shape:
            return dims
    return None


def _dimensions_of_size(shape: tuple[int, ...], parameter: tuple[int, ...]) -> Dims | None:
    """Matches dimensions by size, for a statistic that is reduced or projected, as in GaLore."""
    left = dict(enumerate(parameter))
    dims: list[int | None] = []
    for place, size in enumerate(shape):
        same = [d for d, other in left.items() if other == size]
        dims.append(place if place in same else next(iter(same), None))
        left.pop(dims[-1], None)  # type: ignore[arg-type]
    return tuple(dims) if any(d is not None for d in dims) else None
