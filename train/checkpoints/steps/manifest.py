"""The manifest of a saved step: every file with its size and checksum, written last.

A step with a manifest was saved to its end, and anything that has changed since can be told. The
manifest is JSON in one canonical form and has a checksum of itself, so a change of any of its bytes
is noticed, too.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import fsspec
import xxhash
from etils import epath

from partitioning.untrusted_text import parse_json
from train.errors import ConfigError, first_line
from train.paths import is_remote

FILE = 'manifest.json'
PART = 'manifest.part-'  # the beginning of the names of files that processes write for process 0
FORMAT = 1
STATE = 'state'  # the folder of the arrays
PACKAGES = ('meshwright', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore')
BUFFER_BYTES = 4 * 2**20
NUM_THREADS = 4


class DamagedCheckpoint(ConfigError):
    """A saved step whose files are not those that its manifest lists."""


class FileRecord(NamedTuple):
    """What a manifest knows about a file.

    Attributes:
      size: the size in bytes.
      checksum: the xxh3_128 checksum of its content, in hexadecimal digits.
    """

    size: int
    checksum: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a saved step.

    Attributes:
      step: the step.
      files: the record of each file, by its path below the folder of the step.
      versions: the versions of the packages that wrote it.
    """

    step: int
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    def to_text(self) -> str:
        """The JSON text. Two equal manifests have the same text."""
        data = dataclasses.asdict(self) | {'format': FORMAT}
        return _to_text(data | {'checksum': _checksum_of(data)})


def _to_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + '\n'


def _checksum_of(data: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_to_text(data).encode())


def package_versions() -> dict[str, str]:
    """The versions of the installed packages that matter for a checkpoint."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# Reading and checking.


def read_manifest(folder: epath.Path) -> Manifest | None:
    """Reads the manifest of a step, or returns None if the folder has none.

    Args:
      folder: the folder of the step.

    Raises:
      DamagedCheckpoint: if the manifest itself is damaged.
      ConfigError: if a newer version of this package has written it.
    """
    try:
        text = (folder / FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(
            f'checkpoint {folder} is damaged: {FILE} cannot be read ({first_line(error)})'
        ) from error
    try:
        data = parse_json(text)
        checksum = data.pop('checksum')
        intact = checksum == _checksum_of(data) and text == _to_text(data | {'checksum': checksum})
        intact = intact and isinstance(data['format'], int)
    except (ValueError, TypeError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise DamagedCheckpoint(
            f'checkpoint {folder} is damaged: {FILE} does not have the content that was written'
        )
    if data['format'] != FORMAT:
        raise ConfigError(
            f'{folder / FILE} has the format {data["format"]}, but this version of meshwright '
            f'reads the format {FORMAT}: use a newer version'
        )
    try:
        files = {
            name: FileRecord(int(size), checksum)
            for name, (size, checksum) in data['files'].items()
        }
        return Manifest(step=data['step'], files=files, versions=data['versions'])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(
            f'checkpoint {folder} is damaged: {FILE} is not a manifest ({first_line(error)})'
        ) from error


def check_files(folder: epath.Path, manifest: Manifest) -> None:
    """Checks that a folder has the files of its manifest, with their sizes. No file is read.

    A file in the folder of an item that the manifest does not list is an error, too, because it
    could be taken for a part of an array. Hidden files do not count, which systems leave behind.

    Raises:
      DamagedCheckpoint: with the first file that differs.
    """
    for difference in list_differences(folder, manifest):
        raise DamagedCheckpoint(difference)


def list_differences(folder: epath.Path, manifest: Manifest) -> Iterator[str]:
    """Yields a message for each file that `check_files` does not accept."""
    sizes = find_files(folder)
    for name, record in sorted(manifest.files.items()):
        if name not in sizes:
            yield f'checkpoint {folder} is damaged: {name} is missing'
        elif sizes[name] != record.size:
            yield (
                f'checkpoint {folder} is damaged: {name} has {sizes[name]:,} bytes instead of '
                f'{record.size:,}'
            )
    for name in sorted(sizes.keys() - manifest.files.keys()):
        if '/' in name and not name.rpartition('/')[2].startswith('.'):
            yield f'checkpoint {folder} is damaged: {name} has been added to it'


def check_content(
    folder: epath.Path,
    name: str,
    record: FileRecord,
    read: Callable[[epath.Path], FileRecord] | None = None,
) -> None:
    """Checks one file against its checksum.

    Args:
      folder: the folder of the step.
      name: the path of the file below it.
      record: what the manifest says.
      read: reads the file and returns its size and checksum, by default `record_file`.

    Raises:
      DamagedCheckpoint: if the file cannot be read, or has another size or content.
    """
    try:
        found = (read or record_file)(folder / name)
    except OSError as error:
        raise DamagedCheckpoint(
            f'checkpoint {folder} is damaged: {name} cannot be read ({first_line(error)})'
        ) from error
    if found != record:
        raise DamagedCheckpoint(
            f'checkpoint {folder} is damaged: {name} does not have the content that was written'
        )


def check_contents(folder: epath.Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Checks several files against their checksums, as `check_content` does."""

    def check(name: str) -> None:
        check_content(folder, name, manifest.files[name])

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(check, sorted(names)):
            pass


def is_array_file(name: str) -> bool:
    """Whether a file belongs to one array; whoever reads the array checks its content."""
    return (
        name.startswith(f'{STATE}/')
        and name.count('/') >= 2
        and not name.startswith(f'{STATE}/array_metadatas/')
    )


def find_files(folder: epath.Path) -> dict[str, int]:
    """The size in bytes of each file of a step, by its path, without the manifest and its parts."""
    sizes = dict[str, int]()
    if is_remote(folder):
        store, root = fsspec.url_to_fs(str(folder))
        for path, about in store.find(root, detail=True).items():
            name = path.removeprefix(f'{root}/')
            # Some programs write empty objects in place of folders.
            if not name.endswith('/') and not _is_of_manifest(name):
                sizes[name] = about['size']
        return sizes
    for root, _, names in os.walk(folder):
        below = os.path.relpath(root, folder)
        for name in names:
            key = name if below == '.' else f'{below}/{name}'
            # Another process may rename its part at this moment, so its size is not asked for.
            if not _is_of_manifest(key):
                sizes[key] = os.stat(os.path.join(root, name), follow_symlinks=True).st_size
    return sizes


def _is_of_manifest(name: str) -> bool:
    return name == FILE or name.startswith(PART)


def record_file(path: epath.Path, *, durable: bool = False) -> FileRecord:
    """Reads a file, and returns its size and checksum.

    Args:
      path: the file.
      durable: whether to wait until a local file is on the disk.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open('rb') as file:
        if durable and not is_remote(path):
            os.fsync(file.fileno())
        while block := file.read(BUFFER_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())
