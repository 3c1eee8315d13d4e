"""Mesh axes, and every check of axes, ranks and sizes, written once: a mistake has one message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.spelling import nearest as nearest
from partitioning.values import value_str

# The mesh axes of one dimension: one name, several in order, or None for a replicated dimension.
MeshAxes = str | tuple[str, ...] | None
MeshLike = Mesh | AbstractMesh | Mapping[str, int]


def as_tuple(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes of one dimension as a tuple, which is empty for None."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def from_tuple(axes: Sequence[str]) -> MeshAxes:
    """The mesh axes of one dimension as a PartitionSpec writes them; the inverse of `as_tuple`."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def sharding_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec, empty for None and for UNCONSTRAINED."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def axis_sizes(mesh: MeshLike) -> Mapping[str, int]:
    """The size of each axis of a mesh, in the order of the mesh; other types are a ValueError."""
    if not isinstance(mesh, Mesh | AbstractMesh | Mapping):
        hint = '. Write mesh=partitioner.mesh' if hasattr(mesh, 'mesh') else ''
        raise ValueError(
            f'mesh is {value_str(mesh)}, but must be a mesh or the size of each axis, such as '
            f"{{'data': 4}}{hint}"
        )
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def num_shards(axes: str | Sequence[str] | None, mesh: MeshLike) -> int:
    """The number of shards of a dimension over these mesh axes: the product of their sizes."""
    return math.prod(map(axis_sizes(mesh).__getitem__, as_tuple(axes)))


def describe_axes(mesh: MeshLike) -> str:
    """The axes of a mesh as a message shows them: `data 4 x model 2`."""
    return ' x '.join(f'{name} {size}' for name, size in axis_sizes(mesh).items())


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer >= 1, of Python or numpy."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1  # type: ignore[operator]


ProblemKind = Literal[
    'names',
    'repeated name',
    'rank',
    'absent axis',
    'conflict',
    'unmatched',
    'indivisible',
    'policy',
    'unconstrained',
]


class Problem(NamedTuple):
    """Why an array cannot be laid out: a kind for programs, and a message that says what to do."""

    kind: ProblemKind
    message: str


class ProblemError(ValueError):
    """A problem that a function raises, so that its caller can report it."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


# Receives every problem with the path of its array; `raise_problem` raises the first.
Report = Callable[[str, Problem], None]


def raise_problem(path: str, problem: Problem) -> None:
    """Raises a problem of an array as a ValueError. It begins with the words of T5X's error."""
    raise ValueError(f'Failed to map logical axes for {path}: {problem.message}')


def check_axes(axes: Iterable[str], mesh: MeshLike, where: str) -> None:
    """Raises ValueError if the mesh lacks one of the axes, or if one appears twice.

    `where` is the subject of the message, such as the path of the array that they shard.
    """
    for problem in axis_problems(axes, mesh):
        raise ValueError(f'{where}: {problem.message}')


def check_spec(
    spec: PartitionSpec, mesh: MeshLike, where: str, shape: Sequence[int] | None = None
) -> None:
    """Raises ValueError for a spec that no array on the mesh can have; a shape limits its rank.

    `where` is the subject of the message, such as the path of the array.
    """
    entries = _entries(spec)
    shown = f'{where}: {spec_str(spec)}'
    check_axes([axis for entry in entries for axis in sharding_axes(entry)], mesh, shown)
    if shape is not None and len(entries) > len(shape):
        raise ValueError(f'{where}: {rank_problem(spec_str(spec), len(entries), shape).message}')


def check_layout(spec: PartitionSpec, mesh: MeshLike, where: str, shape: Sequence[int]) -> None:
    """Raises ValueError for a spec that an array of this shape cannot have on the mesh.

    It checks what `check_spec` does, and that the shards divide the size of each dimension.
    """
    check_spec(spec, mesh, where, shape)
    for _, problem in size_problems(spec, mesh, shape):
        raise ValueError(f'{where}: {spec_str(spec)}: {problem.message}')


def size_problems(
    spec: PartitionSpec, mesh: MeshLike, shape: Sequence[int]
) -> Iterator[tuple[int, Problem]]:
    """The dimensions whose size the shards of a spec do not divide, each with its problem."""
    for dim, entry in enumerate(_entries(spec)):
        axes = sharding_axes(entry)
        if shape[dim] % num_shards(axes, mesh):
            yield dim, indivisible(dim, shape, axes, mesh)


def check_definite(spec: PartitionSpec, where: str) -> None:
    """Raises ValueError for a spec that leaves a dimension of a state UNCONSTRAINED."""
    for problem in definite_problems(spec):
        raise ValueError(f'{where}: {problem.message}')


def check_has_devices(mesh: MeshLike, what: str) -> None:
    """Raises ValueError if the mesh is an AbstractMesh, and `what` needs devices."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f'{what} needs devices, but the mesh {describe_axes(mesh)} is an AbstractMesh: pass '
            f'mesh=MeshConfig(axes={dict(mesh.shape)}) or a jax.sharding.Mesh to the partitioner'
        )


def axis_problems(axes: Iterable[str], mesh: MeshLike) -> Iterator[Problem]:
    """The axes that the mesh lacks, and those that appear twice."""
    sizes = axis_sizes(mesh)
    seen: set[str] = set()
    for axis in axes:
        if axis not in sizes:
            yield Problem(
                'absent axis',
                f'mesh axis {axis!r} does not exist; the mesh is {describe_axes(sizes)}.'
                f'{nearest(axis, sizes) or f" Write {either([*sizes, None])} in its place"}',
            )
        if axis in seen:
            yield Problem(
                'conflict',
                f'mesh axis {axis!r} appears twice; a mesh axis can shard only one dimension',
            )
        seen.add(axis)


def rank_problem(described: str, entries: int, shape: Sequence[int]) -> Problem:
    """The problem that names or a spec do not have one entry per dimension."""
    noun = 'entry' if entries == 1 else 'entries'
    dimensions = 'dimension' if len(shape) == 1 else 'dimensions'
    return Problem(
        'rank',
        f'{described} has {entries} {noun}, but the array has {len(shape)} {dimensions}, '
        f'{tuple(shape)}; write one entry for each dimension (None replicates it)',
    )


def check_rank(names: Sequence[Any], shape: Sequence[int], where: str) -> None:
    """Raises ValueError unless there is one logical axis per dimension."""
    if len(names) != len(shape):
        raise ValueError(f'{where}: {names_rank_problem(names, shape).message}')


def names_rank_problem(names: Sequence[Any], shape: Sequence[int]) -> Problem:
    """The problem that there is not one logical axis per dimension."""
    problem = rank_problem(f'logical axes {tuple(names)}', len(names), shape)
    if set(names) == {None}:  # meant to replicate arrays of any rank
        hint = "; PjitPartitioner(layout='data_parallel') replicates every array"
        problem = problem._replace(message=problem.message + hint)
    return problem


def indivisible(
    dim: int,
    shape: Sequence[int],
    axes: Sequence[str],
    mesh: MeshLike,
    *,
    name: str | None = None,
    policies: Sequence[str] = (),
) -> Problem:
    """The problem that the size of a dimension is not divisible by its number of shards.

    `policies` are the values of `on_indivisible` that would accept it, if the caller takes any.
    """
    size, shards = shape[dim], num_shards(axes, mesh)
    over = f'mesh {"axes" if len(axes) > 1 else "axis"} {", ".join(map(repr, axes))}'
    instead = 'None for the dimension' if name is None else f'({name!r}, None) as its rule'
    choices = [f'a size of {either(sizes_that_fit(size, shards))}', 'another mesh', instead]
    if policies:
        choices.append(f'on_indivisible={either(policies)}')
    called = '' if name is None else f' ({name!r})'
    return Problem(
        'indivisible',
        f'dimension {dim}{called} of shape {tuple(shape)}: size {size} is not divisible by '
        f'{shards}, the number of shards over {over}. Use {", ".join(choices[:-1])}, '
        f'or {choices[-1]}',
    )


def padding_problems(mesh: MeshLike) -> tuple[Problem, ...]:
    """Why nothing can be padded on a mesh: XLA pads over Auto axes only."""
    if AxisType.Explicit not in getattr(mesh, 'axis_types', ()):
        return ()
    why = "on_indivisible='pad' needs Auto mesh axes, not Explicit ones: choose 'drop_axis'"
    return (Problem('policy', why),)


def definite_problems(spec: PartitionSpec) -> Iterator[Problem]:
    """The UNCONSTRAINED dimensions of a spec: only an activation can have them, not a state."""
    entries = _entries(spec)
    if PartitionSpec.UNCONSTRAINED in entries:
        dim = entries.index(PartitionSpec.UNCONSTRAINED)
        yield Problem(
            'unconstrained',
            f'{spec_str(spec)} leaves dimension {dim} UNCONSTRAINED, but a state needs a definite '
            'layout: write None or a mesh axis',
        )


def sizes_that_fit(size: int, shards: int) -> tuple[int, ...]:
    """The nearest multiples of `shards` below and above a size, without 0."""
    above = -(-size // shards) * shards
    return (above - shards, above) if above > shards else (above,)


def spec_str(spec: PartitionSpec) -> str:
    """A spec as code, the same on every jax: `P(None, 'model')`."""
    return f'P({", ".join(map(repr, _entries(spec)))})'


def sharding_str(sharding: Any) -> str:
    """A sharding as a message shows it: `P('data') over data 4 x model 2`."""
    if isinstance(sharding, NamedSharding):
        return f'{spec_str(sharding.spec)} over {describe_axes(sharding.mesh.shape)}'
    return str(sharding)


def _entries(spec: PartitionSpec) -> tuple[Any, ...]:
    return spec.partitions if hasattr(spec, 'partitions') else tuple(spec)


def either(values: Sequence[Any]) -> str:
    """Values in a sentence: `'replicate', 'drop_axis' or 'pad'`."""
    *others, last = map(repr, values)
    return f'{", ".join(others)} or {last}' if others else last
