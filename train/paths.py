"""Paths that settings name, and the files of a run: local, or in a store such as `gs://`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import unicodedata
from collections.abc import Iterator
from typing import Any

import fsspec
from etils import epath

from partitioning.untrusted_text import printable
from train.errors import ConfigError

# The modules that each kind of store needs. The extra of meshwright has the name in `EXTRAS`.
STORES = {'gs': ('gcsfs', 'google.cloud.storage'), 's3': ('s3fs', 'boto3')}
EXTRAS = {'gs': 'gcs', 's3': 's3'}
# Where nothing is written, even if this user could.
_OF_SYSTEM: tuple[str, ...] = (
    '/proc',
    '/sys',
    '/dev',
    '/boot',
    '/etc',
    '/bin',
    '/sbin',
    '/lib',
    '/lib64',
)
_OF_SYSTEM += ('/usr/bin', '/usr/sbin', '/usr/lib', '/usr/lib64', '/usr/include')

# Categories of Unicode: control characters, marks of direction and joiners, halves, separators.
_NOT_SHOWN = {'Cc', 'Cf', 'Cs', 'Zl', 'Zp'}


def as_path(setting: str, value: Any) -> epath.Path:
    """The path that a setting names. A tilde stands for the home directory.

    Raises a ConfigError if the value is not a path, or if it names a kind of store that is unknown
    or whose packages are not installed.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value).strip():
        raise ConfigError(f'{setting} is {value!r}: write the path of a file or folder')
    text = os.fspath(value)
    if not is_remote(text):
        return epath.Path(os.path.expanduser(text))
    scheme = text.partition('://')[0]
    if scheme not in STORES:
        raise ConfigError(
            f'{setting} {text!r} begins with {scheme}://: use a local path, gs:// or s3://'
        )
    missing = [module for module in STORES[scheme] if not _is_installed(module)]
    if missing:
        raise ConfigError(
            f'{setting} {text!r} needs the package {missing[0]}: pip install '
            f"'meshwright[{EXTRAS[scheme]}]'"
        )
    # Listings are not cached, because other processes and libraries write to the same store.
    fsspec.config.conf.setdefault(scheme, {}).setdefault('use_listings_cache', False)
    return epath.Path(text)


def as_folder(setting: str, value: Any) -> epath.Path:
    """The folder that a setting names, which need not exist yet.

    Raises a ConfigError as in `as_path`, if a file is in its place, if it belongs to the system, or
    if its name has characters that change how a terminal shows text.
    """
    path = as_path(setting, value)
    _check_shown(setting, os.fspath(path))
    if not is_remote(path):
        _check_not_of_system(setting, path)
        existing = next((p for p in (path, *path.parents) if p.exists()), path.parent)
        if not existing.is_dir():
            raise ConfigError(f'{setting} {path}: {existing} is a file, not a folder')
    return path


def _check_shown(setting: str, path: str) -> None:
    for one in path:
        if unicodedata.category(one) in _NOT_SHOWN:
            raise ConfigError(
                f'{setting} {printable(path)!r} contains the character U+{ord(one):04X}, which '
                'terminals do not show: use another name'
            )


def _check_not_of_system(setting: str, path: epath.Path) -> None:
    real = os.path.realpath(path)
    for folder in _OF_SYSTEM if not real.startswith('/dev/shm/') else ():
        if real == folder or real.startswith(f'{folder}/'):
            raise ConfigError(
                f'{setting} {path} is in {folder}, which belongs to the system: use another folder'
            )
    if real == os.sep:
        raise ConfigError(f'{setting} {path} is the root of the file system: use a folder in it')


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a store of objects, such as `gs://bucket/folder`."""
    return '://' in os.fspath(path)


def absolute(path: epath.Path) -> epath.Path:
    """The path without symbolic links and `..`; a path in a store stays as it is."""
    return path if is_remote(path) else epath.Path(os.path.realpath(path))


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[epath.Path]:
    """Lets the body write a file that is never half-written, for example because the disk is full.

    Yields the path to write, which takes the place of the file at the end of the body. If that
    fails, the file stays as it was.
    """
    if is_remote(path):  # A store shows an object only when it is complete.
        yield path
        return
    unfinished = path.with_name(f'{path.name}.unfinished')
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def beside(name: str) -> str:
    """The name of a file of this trainer in a folder where T5X has written a file `name`."""
    stem, ending = name.rsplit('.', 1)
    return f'{stem}.meshwright.{ending}'


def file_of_run(directory: epath.Path, name: str) -> epath.Path:
    """The file that this trainer calls `name` in the folder of a run. It may not exist."""
    path = directory / beside(name)
    return path if path.exists() else directory / name


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
