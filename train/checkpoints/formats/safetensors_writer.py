"""Writes safetensors files, array by array, in any order."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
from etils import epath

from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.formats.safetensors_files import (
    DTYPES,
    INDEX,
    MAX_HEADER_BYTES,
    MODEL,
    Place,
    as_bytes,
    has_safetensors,
)
from train.errors import ConfigError
from train.paths import as_path, is_remote

MAX_FILE_BYTES = 2**30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    folder: Any,
    arrays: Mapping[str, StoredArray],
    report: Callable[[int], None] = lambda size: None,
    **options: Any,
) -> None:
    """Writes arrays by name into a folder, which may not exist yet, one after another.

    `report` receives the size of each array that has been written, in bytes.
    """
    with SafetensorsWriter(folder, arrays, **options) as writer:
        for name, array in arrays.items():
            writer.write(name, array.read())
            report(array.nbytes)


class SafetensorsWriter:
    """Writes arrays into one `model.safetensors`, or several files with an index, in any order.

    Usage:
      with SafetensorsWriter('out', {'a': jax.ShapeDtypeStruct((4, 8), 'float32')}) as writer:
        writer.write('a', values)

    Files get their names at the end, and the index is last, so a folder with `model.safetensors` or
    an index is complete.

    Args:
      folder: the local folder, which may not exist yet.
      structs: the shape and the dtype of every array, by name.
      max_file_bytes: the size from which another file is begun. One array is never divided.
      metadata: texts for the headers, such as {'format': 'pt'}.

    Raises:
      ConfigError: if the folder has safetensors already or is in a store of objects, or if a dtype
        has no name in the format.
    """

    def __init__(
        self,
        folder: Any,
        structs: Mapping[str, Any],
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        metadata: Mapping[str, str] | None = None,
    ):
        self._folder = as_path('the folder for safetensors', folder)
        if is_remote(self._folder):
            raise ConfigError(
                f'safetensors cannot be written to {self._folder} piece by piece: write them to a '
                'local folder, and copy it'
            )
        if has_safetensors(self._folder):
            raise ConfigError(f'{self._folder} has safetensors already: use another folder')
        self._structs = {
            name: (np.dtype(x.dtype), tuple(map(int, x.shape))) for name, x in structs.items()
        }
        self._groups = _divide(self._structs, max_file_bytes)
        self._missing = set(self._structs)
        self._metadata = dict(metadata or {})
        self._places = dict[str, Place]()
        self._files = dict[epath.Path, BinaryIO]()

    def __enter__(self) -> SafetensorsWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, group in enumerate(self._groups):
                self._begin_file(self._folder / f'{number}.safetensors.partial', group)
        except BaseException:
            self._remove_files()
            raise
        return self

    def _begin_file(self, file: epath.Path, names: list[str]) -> None:
        """Writes the header of a file, and reserves the places of its arrays."""
        header: dict[str, Any] = {'__metadata__': self._metadata} if self._metadata else {}
        end = 0
        for name in names:
            dtype, shape = self._structs[name]
            if dtype not in _NAMES:
                raise ConfigError(
                    f'{name} has the dtype {dtype}, which safetensors files cannot have'
                )
            first, end = end, end + math.prod(shape) * dtype.itemsize
            known = {'dtype': _NAMES[dtype], 'shape': shape}
            header[name] = {**known, 'data_offsets': [first, end]}
            self._places[name] = Place(file, dtype, shape, first)
        text = json.dumps(header, separators=(',', ':')).encode()
        text += b' ' * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise ConfigError(
                f'the header of {len(names):,} arrays would have {len(text):,} bytes, and readers '
                f'take at most {MAX_HEADER_BYTES:,}: use a smaller max_file_bytes'
            )
        opened = self._files[file] = open(file, 'w+b')  # noqa: SIM115 (closed at the end)
        opened.write(len(text).to_bytes(8, 'little') + text)
        opened.truncate(8 + len(text) + end)
        for name in names:
            place = self._places[name]
            self._places[name] = place._replace(offset=place.offset + 8 + len(text))

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes the values of one of the arrays.

        Raises:
          ValueError: if its shape or dtype is not the announced one, or if it is already written.
        """
        place, values = self._places[name], np.asarray(values, order='C')
        if (values.dtype, values.shape) != (place.dtype, place.shape) or name not in self._missing:
            raise ValueError(
                f'{name} is {values.shape} {values.dtype}, but {place.shape} {place.dtype} was '
                'announced, once'
            )
        self._missing.remove(name)
        opened = self._files[place.file]
        opened.seek(place.offset)
        opened.write(as_bytes(values))

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None and self._missing:
                raise ValueError(
                    f'{len(self._missing)} arrays are not written, such as {self._missing}'
                )
            for opened in self._files.values() if kind is None else ():
                opened.flush()
                os.fsync(opened.fileno())
                opened.close()
            if kind is None:
                self._name_files()
        finally:
            self._remove_files()

    def _remove_files(self) -> None:
        """Removes the files that have not got their names."""
        for file, opened in self._files.items():
            with contextlib.suppress(OSError):  # A full disk does not take what is buffered.
                opened.close()
            file.unlink(missing_ok=True)

    def _name_files(self) -> None:
        """Gives the files their names, and writes the index if there are several."""
        count = len(self._groups)
        if count == 1:
            next(iter(self._files)).rename(self._folder / MODEL)
            return
        weight_map = dict[str, str]()
        for number, (file, names) in enumerate(zip(self._files, self._groups, strict=True), 1):
            name = f'model-{number:05}-of-{count:05}.safetensors'
            file.rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._structs.values())
        index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
        partial = self._folder / f'{INDEX}.partial'
        partial.write_text(json.dumps(index, indent=2) + '\n')
        partial.rename(self._folder / INDEX)


def _divide(
    structs: Mapping[str, tuple[np.dtype, tuple[int, ...]]], max_file_bytes: int
) -> list[list[str]]:
    """Divides names into files, in their order. In a file, large items come first.

    Every array then begins at a multiple of the size of its items.
    """
    groups, size = list[list[str]](), math.inf
    for name, (dtype, shape) in structs.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return [sorted(group, key=lambda name: -structs[name][0].itemsize) for group in groups or [[]]]
