"""Writes checkpoints in T5X's older format, which it writes with `use_orbax=False`.

A step is a folder with a msgpack file `checkpoint`, which has the tree, and with a Zarr array for
each array of the tree, `target.encoder.encoder_norm.scale/`. Scalars, arrays of one element and the
factored moments of Adafactor are in the file itself.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from flax import serialization, traverse_util

from train.checkpoints.formats.t5x_files import NEWEST_VERSION
from train.checkpoints.steps.record import TEMPORARY
from train.errors import ConfigError
from train.paths import is_remote
from train.processes.activity import wait_for_devices

FILE = 'checkpoint'
MAX_CHUNK_BYTES = 2**26
_FACTORED = ('v_row', 'v_col')


def check_can_write(directory: epath.Path) -> None:
    """Checks that checkpoints of this format can be written to a folder.

    Raises a ConfigError if several processes would have to write them, or the folder is in a store.
    """
    why = ''
    if (count := jax.process_count()) > 1:
        why = f'this run has {count} processes, and only one can write this format'
    elif is_remote(directory):
        why = f'MODEL_DIR {directory} is in a store, where a folder cannot be renamed'
    if why:
        raise ConfigError(
            f'train_script.train.use_orbax is False, but {why}: write '
            'train_script.train.use_orbax = True'
        )


class LegacyWriter:
    """Writes the steps of one folder in the background. It has the methods of `StepWriter`."""

    def __init__(self, directory: epath.Path, prefix: str):
        check_can_write(directory)
        self._directory, self._prefix = directory, prefix
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[None] | None = None

    def start(
        self,
        step: int,
        tree: Any,
        texts: Mapping[str, Mapping[str, str]],
        dtype: Callable[[str, Any], Any],
    ) -> None:
        """Starts to write a step, as `StepWriter.start`. Items without texts are left out."""
        wait_for_devices(tree)
        named = traverse_util.flatten_dict(tree, sep='/')
        chunks = {name: _chunk_shape(x) for name, x in named.items()}
        arrays: dict[str, np.ndarray] = {}
        for name, array in named.items():
            saved = dtype(name, array)
            # A copy, because on CPUs an array on the host may be the array of the device itself.
            arrays[name] = np.array(array, None if saved is None else jnp.dtype(saved))
        final = self._directory / f'{self._prefix}{step}'
        write = functools.partial(_write_step, final, arrays, chunks, texts)
        self._future = self._pool.submit(write)

    def wait(self) -> None:
        """Waits until the step has its name.

        Raises exceptions of many types, if it cannot be written.
        """
        if self._future is not None:
            future, self._future = self._future, None
            concurrent.futures.wait([future])
            future.result()

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


def _write_step(
    final: epath.Path,
    arrays: Mapping[str, np.ndarray],
    chunks: Mapping[str, tuple[int, ...]],
    texts: Mapping[str, Mapping[str, str]],
) -> None:
    """Writes all files of a step under another name, and renames the folder at the end."""
    folder = final.parent / f'{final.name}{TEMPORARY}'
    folder.mkdir(parents=True)
    for item, files in texts.items():
        for name, text in files.items():
            (folder / item).mkdir(exist_ok=True)
            (folder / item / name).write_text(text)
    leaves, writes = dict[str, Any](), list[Any]()
    for name, array in arrays.items():
        if _is_inline(name, array):
            leaves[name] = array
            continue
        spec = _spec_of(name, array, chunks[name])
        leaves[name] = spec
        place = {'driver': 'file', 'path': f'{os.fspath(folder)}/{spec["kvstore"]["path"]}'}
        store = ts.open({**spec, 'kvstore': place}, create=True).result()
        writes.append(store.write(array))
    for write in writes:
        write.result()
    tree = traverse_util.unflatten_dict(leaves, sep='/')
    content = {'version': NEWEST_VERSION, 'optimizer': tree}
    with (folder / FILE).open('wb') as file:
        file.write(serialization.msgpack_serialize(content))
        file.flush()
        os.fsync(file.fileno())
    shutil.move(os.fspath(folder), os.fspath(final))


def _is_inline(name: str, array: np.ndarray) -> bool:
    """Whether T5X keeps an array in the msgpack file: those that no axis shards."""
    return array.size <= 1 or name.rpartition('/')[2] in _FACTORED


def _spec_of(name: str, array: np.ndarray, chunk: tuple[int, ...]) -> dict[str, Any]:
    """The TensorStore specification that the file has, with a path relative to the step."""
    return {
        'driver': 'zarr',
        'dtype': array.dtype.name,
        'kvstore': {'driver': 'file', 'path': f'{name.replace("/", ".")}/'},
        'metadata': {
            'shape': list(array.shape),
            'chunks': list(chunk),
            'compressor': {'id': 'gzip', 'level': 1},
        },
    }


def _chunk_shape(array: Any) -> tuple[int, ...]:
    """The shape of a device's part, halved along its largest dimension until it is small enough."""
    chunk = list(array.sharding.shard_shape(array.shape))
    while math.prod(chunk) * array.dtype.itemsize > MAX_CHUNK_BYTES:
        largest = chunk.index(max(chunk))
        chunk[largest] = math.ceil(chunk[largest] / 2)
    return tuple(chunk)
