"""The structure of a model without names: its width in every part, and which matrices follow which.

The width of a part is the size that its norms scale, that its tables look up, that its projections
read and write. It is counted for every folder of the paths, so that an encoder and a decoder may
have different ones, and so that a vocabulary or an inner size that is frequent elsewhere is not
taken for it. Matrices whose modules are numbered, such as Dense_0 and Dense_1, form a chain if each
reads what the one before writes.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from partitioning.plan.by_rules import Shape
from partitioning.suggestion.path_words import ARRAY_KEYS, PathWords, Side, read_path

SMALLEST = 8  # smaller dimensions are not the width of a model
Sizes = collections.Counter[int]


class Matrix(NamedTuple):
    """The two dimensions of an array that are multiplied.

    Attributes:
      inputs, outputs: the dimension that the matrix reads, and the one that it writes.
      reads, writes: their sizes.
    """

    inputs: int
    outputs: int
    reads: int
    writes: int


class _Module(NamedTuple):
    """The folder, the name and the key of a matrix: ('mlp', 'Dense_0', 'kernel')."""

    folder: str
    name: str
    key: str


class Structure:
    """What the shapes of a model say about each other.

    `stacked` has the dimension that counts layers, for arrays that have one.
    """

    def __init__(self, shapes: Mapping[str, Shape], stacked: Mapping[str, int]):
        self.shapes = shapes
        self.dims = {
            path: [d for d in range(len(shape)) if d != stacked.get(path)]
            for path, shape in shapes.items()
        }
        self._out_first = _out_first({path: self._sizes(path) for path in shapes})
        self.matrices = {path: self._matrix(path) for path in shapes}
        self._experts = {
            self._sizes(path)[0]
            for path in shapes
            if self.words(path).in_experts and len(self.dims[path]) == 3
        } | _count_experts(shapes)
        self._vocabularies: dict[str, set[int]] = collections.defaultdict(set)
        for path in shapes:
            if self.words(path).use == 'table' and self.dims[path]:
                self._vocabularies[_module(path).folder].add(self._sizes(path)[0])
        self.shared: Sizes = collections.Counter()
        for path in shapes:
            if self.words(path).use != 'bias':  # it would count the output of its matrix twice
                self.shared.update({*self._sizes(path)})
        self._evidence: dict[str, Sizes] = collections.defaultdict(collections.Counter)
        self._note_evidence({p: n for p in shapes if (n := self._scaled(p)) is not None})
        # A word counts for a size that norms or tables have too, unless there are none.
        known = {*self._evidence['']}
        said = {path: self._said_width(path) for path in shapes}
        self._note_evidence({p: n for p, n in said.items() if n and (n in known or not known)})
        self._inner: dict[str, set[int]] = collections.defaultdict(set)
        for path, matrix in self.matrices.items():
            self._note_inner(path, matrix)
        self.sides: dict[str, Side] = {}
        self._returning: set[str] = set()  # in chains without the width that end as they begin
        for chain in self._chains():
            self._read_chain(chain)

    def words(self, path: str) -> PathWords:
        """What the path says; a table with a bias is a matrix."""
        words = read_path(path)
        if words.use == 'table' and _bias_of(path, self.shapes) is not None:
            return words._replace(use='mlp')
        return words

    def width(self, path: str, sizes: Sequence[int]) -> int | None:
        """The width of the nearest folder whose width is one of the sizes."""
        for folder in _folders(path):
            if (width := self._width_of(folder)) in sizes:
                return width
        return None

    def is_inner(self, path: str, size: int) -> bool:
        """Whether matrices in the nearest folder that has any join the width to this size."""
        inner = next((self._inner[f] for f in _folders(path) if f in self._inner), set())
        return size in inner

    def orientation(self, path: str) -> Side:
        """Whether a matrix reads or writes the width, where its sizes do not say so."""
        return self.sides.get(path) or self.words(path).side or 'inward'

    def writes_tokens(self, path: str) -> bool:
        """Whether a matrix writes a score for each entry of a table in the same folder."""
        matrix = self.matrices[path]
        return matrix is not None and matrix.writes in self._vocabularies[_module(path).folder]

    def is_router(self, path: str) -> bool:
        """Whether a matrix writes a score for each expert."""
        matrix = self.matrices[path]
        return matrix is not None and self.words(path).is_router and matrix.writes in self._experts

    @property
    def has_no_width(self) -> bool:
        """Whether no array of the model says what the width is."""
        return not self._evidence.get('')

    # The width.

    def _sizes(self, path: str) -> Shape:
        return tuple(self.shapes[path][d] for d in self.dims[path])

    def _matrix(self, path: str) -> Matrix | None:
        """The last two dimensions of a matrix, also of experts or of a convolution."""
        dims, words = self.dims[path], self.words(path)
        if words.use in ('positions', 'bias', 'table') or len(dims) < 2:
            return None
        out_first = self.is_out_first(path)
        is_window = len(dims) > (2 if words.use == 'convolution' else 3)
        if len(dims) > 2 and (words.use == 'attention' or not (is_window or words.in_experts)):
            return None
        one, other = dims[:2] if out_first and is_window else dims[-2:]
        inputs, outputs = (other, one) if out_first else (one, other)
        shape = self.shapes[path]
        return Matrix(inputs, outputs, shape[inputs], shape[outputs])

    def is_out_first(self, path: str) -> bool:
        """Whether arrays with the key of this one have their output dimension first."""
        key = re.split('[/.]', path)[-1]
        return self._out_first.get(key, key == 'weight')

    def _note_evidence(self, sizes: Mapping[str, int]) -> None:
        for path, size in sizes.items():
            for folder in _folders(path):
                self._evidence[folder][size] += 1

    def _scaled(self, path: str) -> int | None:
        """The size that a norm scales or a table looks up."""
        words, dims = self.words(path), self.dims[path]
        if (words.is_norm and len(dims) == 1) or (words.use == 'table' and len(dims) == 2):
            return _if_large(self.shapes[path][dims[-1]])
        return None

    def _said_width(self, path: str) -> int | None:
        """The size that a projection reads or writes as the width, according to its name."""
        words, matrix = self.words(path), self.matrices[path]
        if matrix is None or len(self.dims[path]) != 2:
            return None
        if words.use == 'logits' or words.side == 'inward':
            return _if_large(matrix.reads)
        return _if_large(matrix.writes) if words.side == 'outward' else None

    @functools.cache  # noqa: B019  # lives as long as the names of one model
    def _width_of(self, folder: str) -> int | None:
        found, everywhere = self._evidence.get(folder), self._evidence['']
        if not found:
            return None
        return max(found, key=lambda n: (found[n], everywhere[n], self.shared[n], -n))

    def _note_inner(self, path: str, matrix: Matrix | None) -> None:
        if matrix is None or self.words(path).use in ('logits', 'convolution'):
            return
        width = self.width(path, (matrix.reads, matrix.writes))
        if width is not None and matrix.reads != matrix.writes:
            inner = matrix.writes if matrix.reads == width else matrix.reads
            for folder in _folders(path):
                self._inner[folder].add(inner)

    # Chains.

    def _chains(self) -> Iterator[list[str]]:
        """Matrices of numbered modules, each of which reads what the one before writes."""
        numbered: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
        sides: dict[tuple[str, str], dict[Side, list[str]]] = {}
        for path, matrix in self.matrices.items():
            words = self.words(path)
            if matrix is None or words.use not in ('mlp', None) or words.is_router:
                continue
            module = _module(path)
            stem, number = re.fullmatch(r'(.*?)_?(\d*)', module.name).groups()  # type: ignore[union-attr]
            same = numbered.setdefault((module.folder, stem, module.key), [])
            same.append((int(number or 0), path))
            if words.side is not None:
                both = sides.setdefault((module.folder, module.key), {})
                both.setdefault(words.side, []).append(path)
        for members in numbered.values():
            paths = [path for _, path in sorted(members)]
            if len(paths) > 1 and self._is_chain(paths):
                yield paths
        for both in sides.values():
            pair = [*both.get('inward', []), *both.get('outward', [])]
            if len(pair) == 2 == len(both) and self._is_chain(pair):
                yield pair

    def _is_chain(self, paths: Sequence[str]) -> bool:
        matrices = [self.matrices[path] for path in paths]
        return all(a and b and a.writes == b.reads for a, b in itertools.pairwise(matrices))

    def _read_chain(self, paths: Sequence[str]) -> None:
        """Alternates the sides of a chain: what one matrix writes is what the next one reads."""
        matrices = [m for path in paths if (m := self.matrices[path]) is not None]
        nodes = [matrices[0].reads, *(m.writes for m in matrices)]
        width = self.width(paths[0], nodes)
        ends = [0, len(nodes) - 1, *range(1, len(nodes) - 1)]
        start = next((i for i in ends if nodes[i] == width), 0)
        order: tuple[Side, Side] = ('inward', 'outward')
        made = {path: order[(i - start) % 2] for i, path in enumerate(paths)}
        said = {path: self.words(path).side for path in paths}
        if all(side in (None, made[path]) for path, side in said.items()):
            self.sides |= made
            if width is None and nodes[0] == nodes[-1]:
                self._returning |= {*paths}

    def returns_elsewhere(self, path: str) -> bool:
        """Whether a chain mixes along another dimension than the width, such as tokens.

        It returns to the size that it has read, and its block has another width.
        """
        return path in self._returning and any(map(self._width_of, _folders(path)))


def _if_large(size: int) -> int | None:
    return size if size >= SMALLEST else None


def _folders(path: str) -> Iterator[str]:
    """The folders that an array is in, from the innermost that is not its module to ''."""
    folder = _module(path).folder
    while folder:
        yield folder
        folder = re.sub(r'(^|[/.])[^/.]*$', '', folder)
    yield ''


@functools.lru_cache(maxsize=4096)
def _module(path: str) -> _Module:
    *folders, last = re.split('[/.]', path)
    if last in ARRAY_KEYS and folders:
        return _Module('/'.join(folders[:-1]), folders[-1], last)
    return _Module('/'.join(folders), last, '')


def _bias_of(path: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of the bias next to an array."""
    module = path.removesuffix(re.split('[/.]', path)[-1])
    return shapes.get(f'{module}bias') or shapes.get(f'{module}b')


def _count_experts(paths: Iterable[str]) -> set[int]:
    """The numbers of experts in lists of them, such as layers/0/experts/7/up/kernel."""
    lists: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        if found := re.search(r'^(.*experts?)[/.](\d+)[/.]', path):
            lists[found[1]].add(found[2])
    return {*map(len, lists.values())}


def _out_first(shapes: Mapping[str, Shape]) -> dict[str, bool]:
    """Whether arrays with a key have their output dimension first, as their biases show."""
    votes: collections.Counter[str] = collections.Counter()
    for path, shape in shapes.items():
        bias = _bias_of(path, shapes)
        if bias is not None and len(bias) == 1 < len(shape) and shape[0] != shape[-1]:
            votes[re.split('[/.]', path)[-1]] += (shape[0] == bias[0]) - (shape[-1] == bias[0])
    return {key: vote > 0 for key, vote in votes.items() if vote}
