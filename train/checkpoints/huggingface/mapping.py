"""Applies a table: our arrays from the files of a model, and the arrays of a model from ours."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from train.checkpoints.arrays.stored import Bounds, HasShape, StoredArray, bounds_of
from train.checkpoints.formats.safetensors_files import Place, as_stored, read_slice, readers
from train.checkpoints.huggingface.notation import (
    Sizes,
    bounds_to_read,
    chunk_of,
    letters_of,
    parse,
    place_of,
    shape_of,
    to_ours,
    write_part,
)
from train.checkpoints.huggingface.tables import Row, Table
from train.errors import ConfigError

PARAMS = 'params/'


@dataclasses.dataclass(frozen=True)
class Pair:
    """One of our arrays, and the arrays of a model with its values.

    Attributes:
      theirs: the name in the files, or the names for each layer if ours has all layers.
      stacked: whether our first dimension is the layer.
    """

    row: Row
    ours: str
    theirs: tuple[str, ...]
    stacked: bool

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """The size of each dimension of one layer.

        Raises a ConfigError if our array has another rank.
        """
        letters, dimensions = letters_of(self.row.our_dimensions), shape[self.stacked :]
        if len(letters) != len(dimensions):
            raise ConfigError(
                f'{self.ours} is {shape}, unlike {self.row.our_dimensions} of a layer'
            )
        return dict(zip(letters, dimensions, strict=True))


def find_pairs(table: Table, ours: Mapping[str, HasShape]) -> dict[str, Pair]:
    """Finds what each of our parameters is called in the files of a model, by our name.

    Names that the table does not have are left out.
    """
    pairs = dict[str, Pair]()
    patterns = [(row, *_patterns(table, row)) for row in table.rows]
    for name in (name for name in ours if name.startswith(PARAMS)):
        for row, single, stacked in patterns:
            if found := re.fullmatch(single, name):
                number = found.groupdict().get('i', '')
                pairs[name] = Pair(row, name, (row.theirs.replace('{i}', number),), False)
            elif stacked and re.fullmatch(stacked, name) and ours[name].shape:
                numbers = range(ours[name].shape[0])
                theirs = tuple(row.theirs.replace('{i}', str(i)) for i in numbers)
                pairs[name] = Pair(row, name, theirs, True)
    return pairs


@functools.cache
def _patterns(table: Table, row: Row) -> tuple[str, str | None]:
    """The regular expressions of our names of a row: of one layer, and of all layers in one."""
    before, layer, after = row.ours.partition('{layer}')
    if not layer:
        return re.escape(PARAMS + row.ours), None
    one = table.layer.replace('{i}', r'(?P<i>0|[1-9]\d*)')
    single = f'{re.escape(PARAMS + before)}{one}{re.escape(after)}'
    stacked = None if table.stacked is None else re.escape(PARAMS + before + table.stacked + after)
    return single, stacked


def as_ours(
    table: Table,
    places: Mapping[str, Place],
    wanted: Mapping[str, HasShape],
    *,
    where: str,
    is_tied: bool = False,
) -> dict[str, StoredArray]:
    """Opens the arrays of a model under our names and in our shapes.

    The shapes of `wanted` tell how to divide joined dimensions. Its vocabulary may be larger than
    the vocabulary of the model; its last rows are then zeros. With `is_tied`, the output layer is
    the embedding, and one in the files is not read. Returns our arrays, without those that the
    model does not have. An array of the model that is not one of ours keeps its name. Raises a
    ConfigError if an array has another shape than ours needs, or if the model has only some layers
    of one of ours.
    """
    has_prefix = any(name.startswith(table.prefix) for name in places)
    found, used = dict[str, StoredArray](), set[str]()
    for name, pair in find_pairs(table, wanted).items():
        theirs = [n if has_prefix else n.removeprefix(table.prefix) for n in pair.theirs]
        used.update(theirs)
        sources = {n: places[n] for n in theirs if n in places}
        if len(sources) == len(theirs):
            found[name] = _open(pair, sources, tuple(wanted[name].shape), where)
        elif sources:
            missing = next(n for n in theirs if n not in places)
            raise ConfigError(
                f'{where} has no {missing}, which {name} of this run needs next to '
                f'{next(iter(sources))}. Use the settings of its config.json, or download it again'
            )
    for name, place in places.items():
        if name not in used and not table.ignores(name, is_tied=is_tied):
            found[name] = as_stored(place)
    return found


def _open(
    pair: Pair, sources: Mapping[str, Place], shape: tuple[int, ...], where: str
) -> StoredArray:
    """Opens one of our arrays from its source, or from the sources of its layers."""
    row, sizes = pair.row, pair.sizes(shape)
    needed = shape_of(row.their_dimensions, sizes)
    for name, place in sources.items():
        if not _fits(row, place.shape, needed):
            raise ConfigError(
                f'{where} belongs to a model of another size: {name} is {place.shape}, but '
                f'{pair.ours} {shape} of this run needs {needed}. Use the settings of its '
                'config.json'
            )
    places = list(sources.values())
    dtype = functools.reduce(jnp.promote_types, [place.dtype for place in places])

    def read(bounds: Bounds) -> np.ndarray:
        out = np.zeros([last - first for first, last in bounds], dtype)
        if not pair.stacked:
            _read_layer(row, places[0], sizes, bounds, out)
            return out
        for i in range(*bounds[0]):
            _read_layer(row, places[i], sizes, bounds[1:], out[i - bounds[0][0]])
        return out

    def start(index: Any) -> Any:
        return readers().submit(read, bounds_of(index, shape))

    chunk = chunk_of(row.our_dimensions, row.their_dimensions, sizes)
    chunk = (1, *chunk) if pair.stacked else chunk
    return StoredArray(shape=shape, dtype=np.dtype(dtype), start=start, chunk=chunk)


def _fits(row: Row, shape: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    """Whether an array has the needed shape, or a smaller vocabulary."""
    if len(shape) != len(needed):
        return False
    vocab = place_of('V', row.their_dimensions)
    pairs = enumerate(zip(shape, needed, strict=True))
    return all(size == need or (i == vocab and size < need) for i, (size, need) in pairs)


def _read_layer(row: Row, place: Place, sizes: Sizes, bounds: Bounds, out: np.ndarray) -> None:
    """Reads a slice of our array of one layer. Rows beyond the vocabulary of the model stay 0."""
    letters = letters_of(row.our_dimensions)
    wanted = dict(zip(letters, bounds, strict=True))
    if (vocab := place_of('V', row.their_dimensions)) is not None:
        size, (first, last) = place.shape[vocab], wanted['V']
        wanted['V'] = (min(first, size), min(last, size))
        sizes = {**sizes, 'V': size}
    region, found = bounds_to_read(row.their_dimensions, sizes, wanted)
    values = to_ours(read_slice(place, region), row.our_dimensions, row.their_dimensions, found)
    out[tuple(map(slice, values.shape))] = values


class Target(NamedTuple):
    """An array of a model, to be written. Its parts are arrays of ours, or a layer of them."""

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[Pair, int | None], ...]


def find_targets(
    table: Table, ours: Mapping[str, HasShape], vocab_size: int | None = None
) -> dict[str, Target]:
    """Lists the arrays of a model that our parameters become, by name.

    The vocabulary of the model may be smaller than ours. Raises a ConfigError if the table does not
    have one of our parameters, or another rank of it.
    """
    pairs = find_pairs(table, ours)
    if unknown := [n for n in ours if n.startswith(PARAMS) and n not in pairs]:
        raise ConfigError(
            f'{len(unknown):,} arrays of this checkpoint have no name in the model to write. The '
            f'first is {unknown[0]}'
        )
    targets = dict[str, Target]()
    for name, pair in pairs.items():
        shape, dtype = tuple(ours[name].shape), np.dtype(ours[name].dtype)
        sizes = pair.sizes(shape)
        if 'V' in sizes and vocab_size is not None:
            sizes = {**sizes, 'V': vocab_size}
        shape = shape_of(pair.row.their_dimensions, sizes)
        for layer, theirs in enumerate(pair.theirs):
            parts = targets[theirs].parts if theirs in targets else ()
            part = (pair, layer if pair.stacked else None)
            targets[theirs] = Target(dtype, shape, (*parts, part))
    for theirs, target in targets.items():
        counts = [group.num_parts for group in parse(target.parts[0][0].row.their_dimensions)]
        if len(target.parts) != max(counts, default=1):
            raise ConfigError(
                f'{theirs} needs {max(counts)} arrays of which there are {len(target.parts)}: '
                f'{", ".join(pair.ours for pair, _ in target.parts)}'
            )
    return targets


def make_target(target: Target, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Makes an array of a model from the values of ours, by name."""
    out = np.empty(target.shape, target.dtype)
    for pair, layer in target.parts:
        row, array = pair.row, values[pair.ours]
        array = array if layer is None else array[layer]
        if (vocab := place_of('V', row.their_dimensions)) is not None:
            index = [slice(None)] * array.ndim
            index[place_of('V', row.our_dimensions) or 0] = slice(target.shape[vocab])
            array = array[tuple(index)]
        write_part(out, array, row.our_dimensions, row.their_dimensions)
    return out
