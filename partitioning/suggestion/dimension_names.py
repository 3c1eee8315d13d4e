"""Names for the dimensions of parameters without names, from their shapes, neighbours and paths.

The dimension of the model's width is 'embed'; `structure` says which size that is in each part of
a model. The other dimension of a matrix is 'mlp', 'heads' or 'vocab'; the paths say which. A
dimension that is neither gets no name. Under the standard rules all three are sharded over the
model axis, so a wrong guess is still a valid layout. What names cannot shard gets mesh axes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from partitioning.plan.by_rules import Shape
from partitioning.rules import STANDARD_MESH_AXES, MeshLike, axis_sizes
from partitioning.suggestion.path_words import PathWords
from partitioning.suggestion.structure import SMALLEST, Structure

Names = tuple[Any, ...]
_USUAL_SHARDS = 8
_NUMBER = re.compile(r'_?\d+')
_MODEL_AXES = ('model', 'tensor', 'tp', 'mp')


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a mesh shards what has names.

    Attributes:
      data, model, total, expert: the shards of a dimension that is sharded over the data axes, the
        model axes, both, and the axis of experts.
      axes: the mesh axes that shard an array with only one dimension to shard.
      embed: the name of the dimension of the width. Where the standard rules would replicate every
        array, because the model axis has one device, these are the data axes.
      model_axes: the mesh axes in place of the names 'mlp', 'heads' and 'vocab', on a mesh whose
        axes have no standard rules; otherwise empty.
      is_standard: whether the standard rules know the axes of the mesh.
    """

    data: int = _USUAL_SHARDS
    model: int = _USUAL_SHARDS
    total: int = _USUAL_SHARDS
    axes: tuple[str, ...] = ('data', 'model')
    embed: str | tuple[str, ...] = 'embed'
    model_axes: tuple[str, ...] = ()
    expert: int = 1
    is_standard: bool = True

    @property
    def batch(self) -> tuple[str, ...]:
        """The mesh axes of the batch, if no standard rule shards it; otherwise empty."""
        data = tuple(axis for axis in self.axes if axis not in self.model_axes)
        return () if self.is_standard else data or self.axes

    @classmethod
    def of_mesh(cls, mesh: MeshLike) -> Shards:
        """The shards on a mesh; see `axis_sizes`."""
        sizes = dict(axis_sizes(mesh))
        used = [axis for axis in sizes if sizes[axis] > 1] or [*sizes]
        if not {*used} <= {*STANDARD_MESH_AXES}:
            model = tuple(axis for axis in used if axis in _MODEL_AXES)
            data = tuple(axis for axis in used if axis not in _MODEL_AXES)
            one, other = (math.prod(sizes[axis] for axis in axes) for axes in (data, model))
            return cls(one, other, one * other, (*data, *model), data, model, is_standard=False)
        by_rule = [axis for axis in ('fsdp', 'model') if sizes.get(axis, 1) > 1]
        axes = tuple(axis for axis in sizes if axis in ('data', 'fsdp', 'model'))
        axes = tuple(axis for axis in axes if sizes[axis] > 1) or axes or tuple(used)
        total, model_size = math.prod(sizes[axis] for axis in axes), sizes.get('model', 1)
        embed = 'embed' if by_rule else axes
        expert = sizes.get('expert', 1)
        return cls(total // model_size, model_size, total, axes, embed, expert=expert)


class Named(NamedTuple):
    """The names of one array.

    Attributes:
      names: one per dimension: a logical axis, a tuple of mesh axes, or None.
      how: 'pair' if two dimensions have names, 'one' if one dimension has all mesh axes, 'part' if
        only some mesh axes shard the array, 'small' if it need not be sharded, and 'none' if it
        should be sharded but no dimension can be.
      undivided: the size of the dimension that could not be sharded as the path suggests, or None.
      use: what the path says; see `PathWords`.
      inner: the names that the array has if it may be sharded over the model axis only.
    """

    names: Names
    how: Literal['pair', 'one', 'part', 'small', 'none']
    undivided: int | None = None
    use: str | None = None
    inner: Names | None = None


class _Roles(NamedTuple):
    """Dimensions of an array by what they are; any may be missing."""

    embed: int | None
    model: int | None
    model_name: str = 'mlp'
    kv: int | None = None
    expert: int | None = None


def replicated(shape: Shape, layers: int | None) -> Named:
    """The names of an array that need not be sharded."""
    return Named(tuple('layers' if d == layers else None for d in range(len(shape))), 'small')


class DimensionNames:
    """Names for all dimensions of all arrays, so that mesh axes shard each array.

    `stacked` has the dimension that counts layers, for arrays that have one. `shards` say what must
    divide the sizes, and how names shard on the mesh.
    """

    def __init__(self, shapes: Mapping[str, Shape], stacked: Mapping[str, int], shards: Shards):
        self._shapes, self._stacked, self._shards = shapes, stacked, shards
        self._structure = Structure(shapes, stacked)
        self._alike: dict[str, list[str]] = collections.defaultdict(list)
        for path in shapes:
            self._alike[_NUMBER.sub('', path)].append(path)

    def named(self, path: str) -> Named:
        """The names of one array."""
        shape, words, shards = self._shapes[path], self._structure.words(path), self._shards
        dims = self._structure.dims[path]
        if not dims:
            return replicated(shape, self._stacked.get(path))
        roles = self._roles(path, dims, words)

        def divides(dim: int | None, by: int) -> bool:
            return dim is not None and shape[dim] % by == 0 and shape[dim] > 0

        expert = roles.expert if divides(roles.expert, shards.expert) else None
        model_name = shards.model_axes or roles.model_name
        pair: dict[int | None, Any] = {roles.embed: shards.embed, roles.model: model_name}
        extra: dict[int | None, Any] = {expert: 'expert'} if shards.expert > 1 else {}
        if divides(roles.embed, shards.data) and divides(roles.model, shards.model):
            return Named(self._names(path, pair | {roles.kv: 'kv'} | extra), 'pair', use=words.use)
        undivided = None if roles.model is None else shape[roles.model]
        if not divides(roles.embed, shards.data) and roles.embed is not None:
            undivided = shape[roles.embed]
        inner = None
        if roles.embed is None and divides(roles.model, shards.model) and shards.model > 1:
            inner = self._names(path, {roles.model: model_name})
        others = sorted(dims, key=lambda dim: -shape[dim])
        for dim in (roles.embed, roles.model, *others):
            if dim != expert and divides(dim, shards.total):
                names = self._names(path, {dim: shards.axes} | extra)
                return Named(names, 'one', undivided, words.use, inner)
        part = {
            dim: pair[dim]
            for dim, by in ((roles.embed, shards.data), (roles.model, shards.model))
            if by > 1 and divides(dim, by)
        }
        names = self._names(path, part | extra)
        largest = max(shape[d] for d in dims)
        return Named(names, 'part' if part else 'none', largest, words.use, inner)

    def _names(self, path: str, names: Mapping[int | None, Any]) -> Names:
        layers = {} if (dim := self._stacked.get(path)) is None else {dim: 'layers'}
        return tuple((layers | {**names}).get(d) for d in range(len(self._shapes[path])))

    def _roles(self, path: str, dims: Sequence[int], words: PathWords) -> _Roles:
        shape, structure = self._shapes[path], self._structure
        matrix = structure.matrices[path]
        scales = words.is_norm and not path.endswith('kernel')  # of two dimensions, it is no matrix
        if words.use in ('positions', 'bias') or len(dims) == 1 or scales:
            return _Roles(self._most_shared(path, dims), None)
        if words.use == 'table':
            return _Roles(dims[-1], max(dims[:-1], key=lambda d: shape[d]), 'vocab')
        if matrix is None:
            return self._roles_of_heads(path, dims, words)
        ends = (matrix.inputs, matrix.outputs)
        expert = dims[0] if words.in_experts and len(dims) == 3 else None
        name = {'attention': 'heads', 'logits': 'vocab'}.get(words.use or '', 'mlp')
        if structure.is_router(path):
            return _Roles(matrix.inputs, None)
        reads = structure.orientation(path) == 'inward'
        width = structure.width(path, (matrix.reads, matrix.writes))
        if path in structure.sides:
            if structure.returns_elsewhere(path):
                return _Roles(None, ends[reads], name, expert=expert)
        elif width is not None and matrix.reads != matrix.writes:
            reads = matrix.reads == width
            if not reads and (words.is_input or len(dims) > len(ends) + (expert is not None)):
                return _Roles(matrix.outputs, None)  # channels or patches are not of a layer
            name = 'vocab' if reads and structure.writes_tokens(path) else name
        elif width is None and words.use != 'logits':
            inner = [d for d in ends if structure.is_inner(path, shape[d])]
            if inner and (words.side is None or ends[not reads] in inner):
                return _Roles(None, max(inner, key=lambda d: shape[d]), name, expert=expert)
            is_square = matrix.reads == matrix.writes
            guesses = structure.has_no_width and words.side is None and not is_square
            if guesses and words.use != 'convolution':
                reads = self._alike_read(path)
        return _Roles(ends[not reads], ends[reads], name, expert=expert)

    def _alike_read(self, path: str) -> bool:
        """Whether matrices whose paths differ only by numbers read what more arrays share.

        They have the same order of names, such as the gates of two recurrent layers.
        """
        read = [
            self._most_shared(other, (matrix.inputs, matrix.outputs)) == matrix.inputs
            for other in self._alike[_NUMBER.sub('', path)]
            if (matrix := self._structure.matrices[other]) is not None
        ]
        return 2 * sum(read) >= len(read)

    def _most_shared(self, path: str, dims: Sequence[int]) -> int:
        """The dimension whose size most arrays have, and of these the smallest and the last."""
        shape, shared = self._shapes[path], self._structure.shared
        likely = [d for d in dims if shape[d] >= SMALLEST] or list(dims)
        return min(likely, key=lambda d: (-shared[shape[d]], shape[d], -d))

    def _roles_of_heads(self, path: str, dims: Sequence[int], words: PathWords) -> _Roles:
        """The roles in an array of three dimensions, such as a kernel [embed, heads, kv]."""
        shape, structure = self._shapes[path], self._structure
        width = structure.width(path, [shape[d] for d in dims])
        same = [d for d in dims if shape[d] == width]
        if not same:
            most = shape[self._most_shared(path, dims)]
            same = [d for d in dims if shape[d] == most]
        # An inward matrix reads the width of the model, an outward one writes it.
        first = (structure.orientation(path) == 'inward') != structure.is_out_first(path)
        embed = same[0] if first else same[-1]
        rest = [d for d in dims if d != embed]
        if words.use == 'attention':
            return _Roles(embed, rest[-2], 'heads', rest[-1])
        return _Roles(embed, max(rest, key=lambda d: shape[d]))
