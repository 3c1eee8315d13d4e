"""Which parameter a leaf of an optimizer's state belongs to, and dimension by dimension how.

optax keeps one tree a statistic, of the parameters' structure, whatever else surrounds it: so the
path of a statistic ends in the path of its parameter, or one key further (SM3 keeps a list each).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partitioning.rules import LogicalAxisRules, Problem, ProblemError
from partitioning.state.boxes import Path

Dims = tuple[int | None, ...]


class Parameter(NamedTuple):
    """An array with axis names, which others may follow.

    Attributes:
      path: its place in the state.
      names: one a dimension.
      shape: global shape; None where a state names its axes without the array.
      axes_as_names: whether a name may be a mesh axis.
      rules: of its own, tried before all others.
      mesh: the mesh that its names are for, if they say.
    """

    path: Path
    names: tuple
    shape: tuple[int, ...] | None
    axes_as_names: bool = False
    rules: LogicalAxisRules = ()
    mesh: Any = None


class Parameters:
    """The parameters of a state, to be found by the ends of paths."""

    def __init__(self, by_path: Mapping[Path, Sequence[Parameter]]):
        """Args:
        by_path: by their paths within their own tree, of which there may be several; that of a
          lone array is empty.
        """
        self._by_path = by_path
        self._lengths = sorted({len(path) for path in by_path} - {0}, reverse=True)

    @functools.cached_property
    def _by_suffix(self) -> dict[Path, list[Parameter]]:
        """By the ends of their paths."""
        found: dict[Path, list[Parameter]] = {}
        for path, parameters in self._by_path.items():
            for start in range(1, len(path)):
                found.setdefault(path[start:], []).extend(parameters)
        return found

    def follow(self, path: Path, shape: tuple[int, ...]) -> tuple[Parameter | None, Dims]:
        """The parameter that a leaf belongs to, and which of its dimensions each of the leaf's is.

        Raises:
          ProblemError: a parameter by its path, but of a shape that does not explain the leaf's;
            or several that could be it and are laid out in different ways.
        """
        nothing = (None,) * len(shape)
        if 0 in shape or not shape:
            return None, nothing
        named = [
            parameters
            for length in self._lengths
            if (parameters := self._by_path.get(path[-length:])) is not None
        ]
        for parameters in named:
            if same := [p for p in parameters if p.shape == shape]:
                return _best(path, same), tuple(range(len(shape)))
        if path[-1].isdecimal() and (owner := self._of_dimension(path, int(path[-1]), shape)):
            return owner, (int(path[-1]),)
        factored = next((key for key in path if key in ('v_row', 'v_col')), None)
        for parameters in named:
            derived = [p for p in parameters if _explain(shape, p.shape or (), factored)]
            if derived:
                owner = _best(path, derived)
                return owner, _explain(shape, owner.shape or (), factored) or nothing
        if named:
            raise ProblemError(_unexplained(shape, named[0][0]))
        return self._guess(path, shape, factored) or (None, nothing)

    def _of_dimension(self, path: Path, dim: int, shape: tuple[int, ...]) -> Parameter | None:
        """The parameter of a list of statistics, one a dimension, as SM3 keeps them."""
        for length in self._lengths:
            for p in self._by_path.get(path[-1 - length : -1], ()):
                if p.shape is not None and p.shape[dim : dim + 1] == shape:
                    return p
        return None

    def _guess(
        self, path: Path, shape: tuple[int, ...], factored: str | None
    ) -> tuple[Parameter, Dims] | None:
        """The one that it can be, where the optimizer has a part of a tree, or a lone array."""
        for start in range(len(path) + 1):
            candidates = (self._by_suffix if path[start:] else self._by_path).get(path[start:], ())
            for fits in (
                [p for p in candidates if p.shape == shape],
                [p for p in candidates if p.shape is not None and shape[1:] == p.shape],
                [p for p in candidates if factored and _explain(shape, p.shape or (), factored)],
            ):
                if not fits:
                    continue
                try:
                    owner = _best(path, fits)
                except ProblemError:
                    return None
                return owner, _explain(shape, owner.shape or (), factored) or ()
        return None


def _best(path: Path, parameters: Sequence[Parameter]) -> Parameter:
    """The parameter whose path has the most in common with that of a leaf."""
    if len(parameters) == 1:
        return parameters[0]
    common = [len({*p.path} & {*path}) for p in parameters]
    best = [p for p, n in zip(parameters, common, strict=True) if n == max(common)]
    if len({p[1:] for p in best}) > 1:
        one, other = ('/'.join(p.path) for p in best[:2])
        message = f'it may belong to {one} or to {other}, which have other axes; {_WAY_OUT}'
        raise ProblemError(Problem('names', message))
    return best[0]


_WAY_OUT = (
    'put it in a flax.linen.LogicallyPartitioned with its own names, or name it in '
    'params_axes_names_override'
)


def _unexplained(shape: tuple[int, ...], parameter: Parameter) -> Problem:
    return Problem(
        'names',
        f'shape {shape} does not follow from its parameter of shape {parameter.shape}, '
        f'{"/".join(parameter.path)}, so its layout is unknown; {_WAY_OUT}',
    )


@functools.lru_cache(maxsize=4096)
def _explain(
    shape: tuple[int, ...], parameter: tuple[int, ...], factored: str | None
) -> Dims | None:
    """For each dimension of a leaf that of the parameter which it is; None: no way to tell.

    Args:
      shape: of the leaf.
      parameter: its shape.
      factored: 'v_row' or 'v_col' for a leaf that says so.
    """
    whole = tuple(range(len(parameter)))
    if shape == parameter:
        return whole
    if shape == (1,):  # what factored optimizers keep for a statistic that they do not use
        return (None,)
    if shape[1:] == parameter:  # a history of the parameter, as in L-BFGS
        return (None, *whole)
    kept = _kept_dimensions(shape, parameter, factored == 'v_col')
    return kept or _dimensions_of_size(shape, parameter)


def _kept_dimensions(
    shape: tuple[int, ...], parameter: tuple[int, ...], columns: bool
) -> Dims | None:
    """The parameter's dimensions that a factored statistic keeps: all but one.

    optax's Adafactor drops the largest dimension for rows and the second largest for columns, and
    takes the later of two equal ones for the larger (numpy.argsort).
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


def _dimensions_of_size(shape: tuple[int, ...], parameter: tuple[int, ...]) -> Dims | None:
    """The parameter's dimensions by their sizes, for one reduced or projected, as in GaLore."""
    left = dict(enumerate(parameter))
    dims: list[int | None] = []
    for place, size in enumerate(shape):
        same = [d for d, other in left.items() if other == size]
        dims.append(place if place in same else next(iter(same), None))
        left.pop(dims[-1], None)  # type: ignore[arg-type]
    return tuple(dims) if any(d is not None for d in dims) else None
