"""What is wrong with the arguments of a call, in our own words.

These checks run after a call has failed, so they cost nothing when it succeeds. Each yields one
message per problem, which names the argument and the array in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.programs.boundary import Argument, Boundary
from partitioning.programs.pmap_leftovers import pmap_hint
from partitioning.programs.tree_matching import TreeMismatchError, pair_leaves, short_repr
from partitioning.rules import (
    check_spec,
    padding_problems,
    size_problems,
    spec_str,
)


def _count_str(count: int) -> str:
    """A number of entries in a sentence."""
    return f'{count} entry' if count == 1 else f'{count} entries'


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
                f'the static argument {boundary.arguments.name(i)} is a {_type(args[i])}, which is '
                'not hashable: pass a tuple or a frozen dataclass, or an array that is not static'
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
                f'{where} is a {_type(leaf)}, {short_repr(leaf)}: a partitioned function takes '
                f'arrays and numbers; convert it with numpy.asarray, or {out}'
            )


def fit_problems(boundary: Boundary, arguments: Sequence[Argument]) -> Iterator[str]:
    """The trees and shapes of the arguments must fit their entries."""
    misfits = [argument for argument in arguments if any(_misfits(boundary, argument))]
    if not misfits:
        return
    if pair := _swapped(boundary, arguments):
        one, other = pair
        yield (
            f'the entries of {one.name} and {other.name} in in_axis_resources are in the wrong '
            f'order: write that of {one.name} first'
        )
    for argument in misfits:
        yield from _misfits(boundary, argument)


def _swapped(boundary: Boundary, arguments: Sequence[Argument]) -> tuple[Argument, Argument] | None:
    """Two arguments that would fit if their entries were exchanged."""

    def fits(argument: Argument, entry: Any) -> bool:
        return not any(_misfits(boundary, argument._replace(entry=entry)))

    for n, one in enumerate(arguments):
        for other in arguments[n + 1 :]:
            wrong = not (fits(one, one.entry) and fits(other, other.entry))
            if wrong and fits(one, other.entry) and fits(other, one.entry):
                return one, other
    return None


def _misfits(boundary: Boundary, argument: Argument) -> Iterator[str]:
    try:
        for path, sharding, leaf in argument.pairs():
            where = f'{argument.name}{jax.tree_util.keystr(path)}'
            for problem in shape_problems(where, leaf, sharding):
                hint = pmap_hint(argument, boundary.mesh, leaf, sharding)
                yield problem + hint + _list_hint(path, leaf)
    except TreeMismatchError as error:
        where = f'{argument.name}{jax.tree_util.keystr(error.path)}'
        yield (
            f'{where}: the entry in in_axis_resources has {error.first}, but the argument has '
            f'{error.second}. Make the specs from this {argument.name}, for example with '
            'partitioner.plan, or pass the one that they were made from'
        )


def _list_hint(path: Sequence[Any], leaf: Any) -> str:
    """A hint for a list of numbers, which is a tree with one leaf per number."""
    if not isinstance(leaf, int | float) or not path or not hasattr(path[-1], 'idx'):
        return ''
    return '. A list of numbers is not one array: convert it with numpy.asarray'


def static_field_problems(arguments: Sequence[Argument]) -> Iterator[str]:
    """The static fields of an argument must be those of its entry, if it is passed by name."""
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


def shape_problems(where: str, leaf: Any, sharding: Sharding) -> Iterator[str]:
    """An array needs a dimension for each entry of its spec, of a size that its shards divide."""
    if not isinstance(sharding, NamedSharding):
        return
    shape, spec = np.shape(leaf), sharding.spec
    mesh: Any = sharding.mesh
    try:
        check_spec(spec, mesh, where, shape)
    except ValueError as error:
        yield str(error)
        return
    for dim, problem in size_problems(spec, mesh, shape):
        yield f'{where}: {spec_str(spec)}: {problem.message}{_padding_hint(spec, dim, mesh)}'


def _padding_hint(spec: PartitionSpec, dim: int, mesh: Mesh) -> str:
    if padding_problems(mesh):
        return ''
    outside = PartitionSpec(*(None if i == dim else entry for i, entry in enumerate(spec)))
    return (
        f'; the entry PaddedSpec({spec_str(outside)}, {spec_str(spec)}) pads it inside the function'
    )


def result_problems(boundary: Boundary, result: Any) -> Iterator[str]:
    """The result must fit out_axis_resources."""
    try:
        for path, sharding, leaf in pair_leaves(
            boundary.out_shardings, result, prefix=True, static_fields=False
        ):
            where = f'result{jax.tree_util.keystr(path)}'
            if not hasattr(leaf, 'shape'):
                yield f'{where} is a {_type(leaf)}, {short_repr(leaf)}: return only arrays'
                continue
            yield from shape_problems(where, leaf, sharding)
    except TreeMismatchError as error:
        yield (
            f'result{jax.tree_util.keystr(error.path)}: out_axis_resources has {error.first}, '
            f'but the function returns {error.second}: write one entry for each value that it '
            'returns'
        )


def _type(value: Any) -> str:
    return type(value).__name__
