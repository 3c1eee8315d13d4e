"""A part of a local checkpoint: the shards that one process keeps, in a folder with a manifest.

The folder of a part is laid out like the folder of a checkpoint, with a record and a manifest, so
that the same functions examine, verify and delete it. Its arrays are in one file, and an index says
where each shard is and which checksum it has. A part alone cannot be restored.

Nothing waits until it is on the disk: after the failure of a whole host its part is lost anyway,
and checksums find what a power failure leaves half-written.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from partitioning.state import path_str
from partitioning.untrusted_text import parse_json
from train.checkpoints.arrays.placing import holders_of
from train.checkpoints.arrays.stored import Bounds, bounds_of
from train.checkpoints.steps import manifest
from train.checkpoints.steps.manifest import FileRecord, Manifest, package_versions, record_file
from train.checkpoints.steps.record import ITEM, StepRecord
from train.paths import replacing
from train.processes.activity import wait_for_devices

INDEX, SHARDS = 'state/index.json', 'state/shards/data'
_ALIGNMENT = 64  # so that the values of a shard can be used where they are


class Key(NamedTuple):
    """Which part it is: of which start of the run, which step, and which of how many parts."""

    start: str
    step: int
    part: int
    of: int

    @property
    def folder(self) -> str:
        """Its place below the folder of a process."""
        return f'{self.part}-of-{self.of}/{self.step}'


class Shard(NamedTuple):
    """Where a shard is: its bounds in the array, its place in the file, and its checksum."""

    bounds: Bounds
    offset: int
    checksum: str = ''


@dataclasses.dataclass(frozen=True)
class ArrayIndex:
    """An array of the state, and its shards in one part; `chunk` is the shape of all shards."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    shards: Mapping[Bounds, Shard]

    @property
    def shard_bytes(self) -> int:
        """The size of a shard, in bytes."""
        return math.prod(self.chunk) * self.dtype.itemsize


Index = Mapping[str, ArrayIndex]


def plan_part(state: Any, process: int) -> dict[str, ArrayIndex]:
    """Decides which shards of a state a process keeps, and where they are in its file.

    A shard that several processes hold is kept by the one that has the fewest bytes so far. Every
    process finds the same. `state` has arrays or ShapeDtypeStructs with shardings.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    kept, end, index = dict[int, int](), 0, dict[str, ArrayIndex]()
    for path, array in leaves:
        shards, dtype = dict[Bounds, Shard](), np.dtype(array.dtype)
        chunk = tuple(array.sharding.shard_shape(array.shape))
        size = math.prod(chunk) * dtype.itemsize
        for bounds, holders in holders_of(array.sharding, tuple(array.shape)):
            keeper = min(holders, key=lambda process: (kept.get(process, 0), process))
            kept[keeper] = kept.get(keeper, 0) + size
            if keeper == process:
                shards[bounds] = Shard(bounds, end)
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
        index[path_str(path)] = ArrayIndex(tuple(array.shape), dtype, chunk, shards)
    return index


def part_bytes(index: Index) -> int:
    """The size of the file of a part."""
    ends = (s.offset + array.shard_bytes for array in index.values() for s in array.shards.values())
    return -(-max(ends, default=0) // _ALIGNMENT) * _ALIGNMENT


def copy_shards(state: Any, index: Index, out: np.ndarray) -> None:
    """Copies the shards of a part from the devices into memory of `part_bytes` bytes."""
    wait_for_devices(state)
    found = list[tuple[Any, int]]()
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        shards = dict(index[path_str(path)].shards)
        for one in array.addressable_shards:
            # Another device of this process may have the same shard.
            if wanted := shards.pop(bounds_of(one.index, array.shape), None):
                one.data.copy_to_host_async()
                found.append((one.data, wanted.offset))
        if shards:
            raise RuntimeError(f'{path_str(path)} has no shard {next(iter(shards))} here')
    for data, offset in found:
        values = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        out[offset : offset + values.size] = values


# Writing and reading.


def write_part(folder: epath.Path, key: Key, index: Index, data: np.ndarray) -> None:
    """Writes a part into a new folder, its manifest last. Raises an OSError if it cannot."""
    arrays = {
        name: {
            'shape': array.shape,
            'dtype': str(array.dtype),
            'chunk': array.chunk,
            'shards': [
                (s.bounds, s.offset, FileRecord.of(data[s.offset :][: array.shard_bytes]).checksum)
                for s in array.shards.values()
            ],
        }
        for name, array in index.items()
    }
    texts = {f'{ITEM}/{name}': text for name, text in StepRecord(step=key.step).files().items()}
    texts[INDEX] = json.dumps(key._asdict() | {'arrays': arrays})
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / SHARDS).parent.mkdir(parents=True, exist_ok=True)
    with (folder / SHARDS).open('wb') as file:
        file.write(data.data)
    files = {name: record_file(folder / name) for name in texts}
    files[SHARDS] = FileRecord.of(data)
    complete_part(folder, Manifest(step=key.step, files=files, versions=package_versions()))


def complete_part(folder: epath.Path, about: Manifest) -> None:
    """Writes the manifest of a part. The part counts as good from then on."""
    with replacing(folder / manifest.FILE) as unfinished:
        unfinished.write_text(about.to_text())


def parse_index(text: str, key: Key) -> dict[str, ArrayIndex]:
    """Reads the index of a part. Raises a ValueError if it is malformed, or of another part."""
    try:
        data = parse_json(text)
        if Key(*(data[name] for name in Key._fields)) != key:
            raise ValueError(f'it is the index of another part than {key.folder}')
        return {
            name: ArrayIndex(
                tuple(array['shape']),
                jnp.dtype(array['dtype']),
                tuple(array['chunk']),
                {shard.bounds: shard for shard in _read_shards(array['shards'])},
            )
            for name, array in data['arrays'].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'the index of a part is malformed ({error!r})') from error


def _read_shards(listed: Any) -> Iterator[Shard]:
    for bounds, offset, checksum in listed:
        yield Shard(tuple((first, last) for first, last in bounds), offset, checksum)
