"""Which parameter a leaf of an optimizer's state belongs to, and dimension by dimension how.

optax keeps one tree a statistic, of the parameters' structure, whatever else surrounds it: so the
path of a statistic ends in the path of its parameter, or one key further (SM3 keeps a list each).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
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

    @functools.cached_property
    def _by_suffix(self) -> dict[Path, Parameter]:
        """By the end of a path, where that is the end of only one."""
        found: dict[Path, list[Parameter]] = {}
        for path, parameters in self._by_path.items():
            for start in range(1, len(path)):
                found.setdefault(path[start:], []).extend(parameters)
        return {suffix: owners[0] for suffix, owners in found.items() if len(owners) == 1}

    def _owners(self, path: Path) -> Iterator[tuple[Parameter, Path]]:
        """Candidates, the likeliest first, with the keys of `path` after the parameter's own."""
        for ends in (len(path), len(path) - 1):
            for start in range(ends + 1):
                parameters = self._by_path.get(path[start:ends], ())
                if len(parameters) > 1:  # of two trees of one structure, such as a GAN's
                    parameters = sorted(parameters, key=lambda p: -len({*p.path} & {*path}))
                for parameter in parameters:
                    yield parameter, path[ends:]
        # Of a tree that the optimizer has only a part of.
        for start in range(len(path)):
            if path[start:] in self._by_suffix:
                yield self._by_suffix[path[start:]], ()

    def follow(self, path: Path, shape: tuple[int, ...]) -> tuple[Parameter | None, Dims]:
        """The parameter that a leaf belongs to, and which of its dimensions each of the leaf's is.

        Raises:
          ProblemError: a parameter by its path, but of a shape that does not explain the leaf's.
        """
        rank = len(shape)
        unexplained = None
        for parameter, keys in self._owners(path) if rank else ():
            lone = () in self._by_path and parameter.path[-1:] != path[-1:] and not keys
            factored = next((key for key in path if key in ('v_row', 'v_col')), None)
            dims = _explain(shape, parameter.shape or (), keys, factored, lone)
            if dims is not None:
                return parameter, dims
            if parameter.path and parameter.path[-1] in path:
                unexplained = unexplained or parameter
        if unexplained is not None:
            message = (
                f'shape {shape} does not follow from its parameter of shape {unexplained.shape}, '
                f'{"/".join(unexplained.path)}, so its layout is unknown; put it in a '
                'flax.linen.LogicallyPartitioned with its own names, or name it in '
                'params_axes_names_override'
            )
            raise ProblemError(Problem('names', message))
        return None, (None,) * rank


@functools.lru_cache(maxsize=4096)
def _explain(
    shape: tuple[int, ...],
    parameter: tuple[int, ...],
    keys: Path,
    factored: str | None,
    lone: bool,
) -> Dims | None:
    """For each dimension of a leaf that of the parameter which it is; None: no way to tell.

    Args:
      shape: of the leaf.
      parameter: its shape.
      keys: of the leaf's path, after that of the parameter.
      factored: 'v_row' or 'v_col' for a leaf that says so.
      lone: whether nothing in the path says that the leaf belongs to the parameter.
    """
    whole = tuple(range(len(parameter)))
    if keys:  # the statistics of one parameter, such as SM3's for each dimension
        dim = int(keys[0]) if keys[0].isdecimal() else -1
        return (dim,) if 0 <= dim < len(parameter) and shape == (parameter[dim],) else None
    if shape == parameter:
        return whole
    if shape == (1,):  # what factored optimizers keep for a statistic that they do not use
        return (None,)
    if shape[1:] == parameter:  # a history of the parameter, as in L-BFGS
        return (None, *whole)
    if lone and factored is None:
        return None
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
