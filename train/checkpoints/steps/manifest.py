"""The manifest of a saved step: every file with its size and checksum, written last.

A step with a manifest was saved completely, and `verifying` finds every later change of its files.
The manifest is JSON in one canonical form and contains its own checksum, so a change of any of its
bytes is noticed, too.

All processes make the manifest together, in the background. Each process reads its share of the
files back and leaves a part of the manifest in the folder of the step, which all processes share.
Process 0 waits for the parts and writes the manifest. Collectives are not used, because the
training thread uses them at the same time.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import fsspec
import jax
import xxhash
from etils import epath

from partitioning.untrusted_text import parse_json
from train.errors import ConfigError, first_line
from train.paths import is_remote
from train.processes.activity import waiting

FILE = 'manifest.json'
PART = 'manifest.part-'  # the beginning of the names of files that processes write for process 0
FORMAT = 1
STATE = 'state'  # the folder of the arrays
PACKAGES = ('meshwright', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore')
BUFFER_BYTES = 4 * 2**20
NUM_THREADS = 4
SECONDS_TO_WAIT = 3600.0
SECONDS_BETWEEN_LOOKS = 0.05
Description = TypeVar('Description')


class DamagedCheckpoint(ConfigError):
    """A saved step whose files differ from its manifest."""


def damaged(folder: Any, what: str) -> DamagedCheckpoint:
    """The error for a step, with what is wrong with it."""
    return DamagedCheckpoint(f'checkpoint {folder} is damaged: {what}')


class FileRecord(NamedTuple):
    """What a manifest knows about a file.

    `checksum` is the xxh3_128 checksum of its content, in hexadecimal digits.
    """

    size: int
    checksum: str

    @classmethod
    def of(cls, content: Any) -> FileRecord:
        """The record of a file with this content, bytes or an array of them."""
        return cls(memoryview(content).nbytes, xxhash.xxh3_128_hexdigest(content))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a saved step.

    Attributes:
      files: the record of each file, by its path below the folder of the step.
      versions: the versions of the packages that wrote it.
    """

    step: int
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    def to_text(self) -> str:
        """The JSON text. Two equal manifests have the same text."""
        return _with_checksum(dataclasses.asdict(self) | {'format': FORMAT})


def _with_checksum(data: Mapping[str, Any]) -> str:
    """JSON in one canonical form, with its own checksum."""
    text = json.dumps(data, indent=1, sort_keys=True) + '\n'
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    return json.dumps({**data, 'checksum': checksum}, indent=1, sort_keys=True) + '\n'


def package_versions() -> dict[str, str]:
    """The versions of the installed packages that matter for a checkpoint."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# Reading.


def read_manifest(folder: epath.Path) -> Manifest | None:
    """Reads the manifest of a step, or returns None if its folder has none.

    Raises a DamagedCheckpoint if the manifest itself is damaged, and a ConfigError if a newer
    version of this package has written it.
    """
    try:
        text = (folder / FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(folder, f'{FILE} cannot be read ({first_line(error)})') from error
    return parse_manifest(text, folder)


def parse_manifest(text: str, folder: Any) -> Manifest:
    """Reads the text of a manifest. `folder` says in messages where it is from.

    Raises a DamagedCheckpoint and a ConfigError as `read_manifest`.
    """
    try:
        data = parse_json(text)
        del data['checksum']
        if text != _with_checksum(data):
            raise ValueError
        if (format := data.pop('format')) == FORMAT:
            listed = data.pop('files').items()
            files = {name: FileRecord(int(size), checksum) for name, (size, checksum) in listed}
            return Manifest(**data, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f'{FILE} does not have the content that was written'
        raise damaged(folder, what) from error
    raise ConfigError(
        f'{folder}/{FILE} has the format {format}, but this version of meshwright reads the format '
        f'{FORMAT}: use a newer version'
    )


def if_intact(
    read: Callable[[epath.Path], Description | None], folder: epath.Path
) -> Description | None:
    """What `read_manifest` or `read_record` finds, or None also if it is damaged."""
    try:
        return read(folder)
    except DamagedCheckpoint:
        return None


def is_array_file(name: str) -> bool:
    """Whether a file belongs to one array; whoever reads the array checks its content."""
    return (
        name.startswith(f'{STATE}/')
        and name.count('/') >= 2
        and not name.startswith(f'{STATE}/array_metadatas/')
    )


def find_files(folder: epath.Path) -> dict[str, int]:
    """The size in bytes of each file of a step, by its path, without the manifest and its parts.

    A link that leads nowhere is missing from it.
    """
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
            path = os.path.join(root, name)
            if not _is_of_manifest(key) and (os.path.exists(path) or not os.path.islink(path)):
                sizes[key] = os.stat(path).st_size
    return sizes


def _is_of_manifest(name: str) -> bool:
    return name == FILE or name.startswith(PART)


def record_file(path: epath.Path, *, durable: bool = False) -> FileRecord:
    """Returns the size and checksum of a file. `durable` waits until a local one is on the disk."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open('rb') as file:
        if durable and not is_remote(path):
            os.fsync(file.fileno())
        while block := file.read(BUFFER_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


# Writing, by all processes together.


def complete_step(folder: epath.Path, step: int) -> None:
    """Writes the manifest of a step, or this process's part of it, when its files are on the disk.

    Orbax must have committed the folder of the step. Raises an OSError if it has no files, because
    the storage has lost them, if a file cannot be read, or if the manifest cannot be written, and a
    TimeoutError if the part of another process is missing after an hour.
    """
    count, index = jax.process_count(), jax.process_index()
    names = sorted(find_files(folder))
    if not names and index == 0:
        raise FileNotFoundError(f'{folder} has no files, although all were written')
    files = _record_files(folder, names[index::count])
    if index:
        _write_atomically(_part(folder, index), json.dumps(files))
        return
    for other in range(1, count):
        files |= _wait_for_part(_part(folder, other))
    # On shared storage, a process can miss a file that another one has just written.
    files |= _record_files(folder, [name for name in names if name not in files])
    if not is_remote(folder):
        _sync_folder(folder)
        _sync_folder(folder.parent)
    write_manifest(folder, Manifest(step=step, files=files, versions=package_versions()))
    for other in range(1, count):
        _part(folder, other).unlink(missing_ok=True)


def _part(folder: epath.Path, process: int) -> epath.Path:
    return folder / f'{PART}{process}.json'


def _wait_for_part(path: epath.Path) -> dict[str, FileRecord]:
    """Reads the part of another process as soon as it exists."""
    give_up = time.monotonic() + SECONDS_TO_WAIT
    with waiting():
        while not path.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f'{path} is still missing after {SECONDS_TO_WAIT:,.0f} s')
            time.sleep(SECONDS_BETWEEN_LOOKS)
    return {name: FileRecord(*record) for name, record in json.loads(path.read_text()).items()}


def _record_files(folder: epath.Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Records files of a step that has just been saved, when they are on the disk."""
    names = list(names)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        records = pool.map(lambda name: record_file(folder / name, durable=True), names)
        return dict(zip(names, records, strict=True))


def write_manifest(folder: epath.Path, manifest: Manifest) -> None:
    """Writes the manifest of a step, atomically. The step counts as good from then on.

    Raises an OSError if it cannot be written.
    """
    _write_atomically(folder / FILE, manifest.to_text())


def _write_atomically(path: epath.Path, text: str) -> None:
    """Writes a text file atomically, and waits until it is on the disk."""
    if is_remote(path):  # Writing an object is atomic by itself.
        path.write_text(text)
        return
    temporary = path.parent / f'{PART}{path.name}'
    with temporary.open('w') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: epath.Path) -> None:
    """Waits until the names of the files in a local folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
