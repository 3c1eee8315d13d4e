"""Keeps libraries that write without Python from changing files and stores.

tensorstore (which writes the arrays of Orbax's checkpoints), TensorFlow and `etils.epath` are told
other paths, in the folder that is removed at the end. A store, such as `gs://bucket`, has nothing
in it if it cannot be reached.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from meshwright.dry.replacing import Hook
from meshwright.dry.stores import Stores, writes_mode
from meshwright.jax_private import Replacement

_BUCKETS = {'gcs': 'gs', 's3': 's3', 'gcs_grpc': 'gs'}  # the drivers of tensorstore


def library_hooks(stores: Stores) -> dict[str, Hook]:
    """What to replace in libraries that the script imports, by the name of the module."""
    tensorflow = 'tensorflow.python'
    return {
        'tensorstore': functools.partial(_replace_tensorstore, stores),
        'etils.epath.gpath': functools.partial(_replace_epath, stores),
        'orbax.checkpoint._src.metadata.sharding': _replace_devices,
        f'{tensorflow}.lib.io._pywrap_file_io': functools.partial(_replace_files, stores),
        f'{tensorflow}.lib.io.tf_record': functools.partial(_replace_records, stores),
        f'{tensorflow}.ops.gen_summary_ops': functools.partial(_replace_summaries, stores),
    }


# tensorstore.


def _replace_tensorstore(stores: Stores, module: Any) -> Iterator[Replacement]:
    def redirect(original: Any) -> Any:
        @functools.wraps(original)
        def open_(spec: Any, *args: Any, **kwargs: Any) -> Any:
            json = spec.to_json() if hasattr(spec, 'to_json') else spec
            writes = bool(kwargs.get('create') or kwargs.get('delete_existing'))
            return original(_redirect(stores, json, writes), *args, **kwargs)

        return open_

    yield module, 'open', redirect(module.open)
    yield module.KvStore, 'open', staticmethod(redirect(module.KvStore.open))


def _redirect(stores: Stores, spec: Any, writes: bool) -> Any:
    """A specification of a store in which each path is one that may be written."""
    if isinstance(spec, list):
        return [_redirect(stores, part, writes) for part in spec]
    if isinstance(spec, str):
        scheme, found, path = spec.partition('://')
        if not found or scheme not in ('file', *_BUCKETS.values()):
            return spec
        return _file_of(stores, path if scheme == 'file' else spec, writes) or spec
    if not isinstance(spec, dict):
        return spec
    driver, path = spec.get('driver'), spec.get('path', '')
    if driver in _BUCKETS:
        url = f'{_BUCKETS[driver]}://{spec.get("bucket", "")}/{path}'
        return _file_of(stores, url, writes) or spec
    moved = (driver == 'file' and _file_of(stores, path, writes)) or {}
    return {name: _redirect(stores, value, writes) for name, value in spec.items()} | moved


def _file_of(stores: Stores, path: str, writes: bool) -> dict[str, Any] | None:
    """The folder that stands for a path; None if the path itself is to be opened."""
    new = not path.startswith(_schemes()) and not os.path.lexists(path)
    if writes:
        stores.written(path)
    elif not new and not stores.has(path):
        return None
    slash = '/' if path.endswith('/') else ''
    return {'driver': 'file', 'path': str(stores.shadow(path)).rstrip('/') + slash}


def _schemes() -> tuple[str, ...]:
    return tuple(f'{scheme}://' for scheme in _BUCKETS.values())


def _replace_devices(module: Any) -> Iterator[Replacement]:
    """Arrays that were computed here are restored here, though the script sees another machine."""
    owner = module.SingleDeviceShardingMetadata
    original = owner.to_jax_sharding

    def to_jax(self: Any) -> Any:
        here = {str(device): device for device in jax.devices('cpu')}
        device = here.get(self.device_str)
        return original(self) if device is None else SingleDeviceSharding(device)

    yield owner, 'to_jax_sharding', to_jax


# etils.epath.


def _replace_epath(stores: Stores, module: Any) -> Iterator[Replacement]:
    owner = module._GPath
    original = vars(owner)['_backend']
    local = module.backend_lib.os_backend

    def backend(path: Any) -> Any:
        if not path._uri_scheme:
            return original.__get__(path, owner)
        return _Store(stores, local, lambda: original.__get__(path, owner))

    yield owner, '_backend', property(backend)


class _Store:
    """A store as `etils.epath` sees it: what the script wrote to it, and what is there."""

    def __init__(self, stores: Stores, local: Any, find: Callable[[], Any]):
        self._stores = stores
        self._local = local
        self._find = find

    def exists(self, path: Any) -> bool:
        return self._stores.has(path) or self._ask('exists', path, False)

    def isdir(self, path: Any) -> bool:
        return os.path.isdir(self._stores.shadow(path)) or self._ask('isdir', path, False)

    def listdir(self, path: Any) -> list[str]:
        own = os.listdir(self._stores.shadow(path)) if self._stores.has(path) else []
        return sorted({*own, *self._ask('listdir', path, [])})

    def glob(self, path: Any) -> list[str]:
        own = self._local.glob(self._stores.shadow(path))
        return [*map(self._name, own), *self._ask('glob', path, [])]

    def walk(self, top: Any, **options: Any) -> Iterator[Any]:
        for folder, folders, files in self._local.walk(self._stores.shadow(top), **options):
            yield self._name(folder), folders, files

    def open(self, path: Any, mode: str) -> Any:
        if writes_mode(mode):
            return self._local.open(self._stores.written(path), mode)
        own = self._stores.has(path)
        return (self._local if own else self._find()).open(self._stores.seen(path), mode)

    def stat(self, path: Any) -> Any:
        own = self._stores.has(path)
        return (self._local if own else self._find()).stat(self._stores.seen(path))

    def __getattr__(self, name: str) -> Any:
        """What changes a store: copy, makedirs, mkdir, remove, rename, replace, rmtree."""
        change = getattr(self._local, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            if name in ('remove', 'rmtree') and self._stores.removed(args[0]):
                return None
            paths = [self._stores.written(x) if _is_path(x) else x for x in args]
            return change(*paths, **kwargs)

        return changed

    def _ask(self, name: str, path: Any, otherwise: Any) -> Any:
        """What the store itself answers, or another answer if it cannot be reached."""
        try:
            return getattr(self._find(), name)(path)
        except Exception:
            return otherwise

    def _name(self, shadow: Any) -> str:
        """The name in the store of what the script wrote to it."""
        _, _, path = str(shadow).partition(self._stores.folder)
        return path.replace(os.sep, '://', 1)


def _is_path(x: Any) -> bool:
    return isinstance(x, str | bytes | os.PathLike)


# TensorFlow.


def _replace_files(stores: Stores, module: Any) -> Iterator[Replacement]:
    def paths(original: Any, map_path: Callable[[Any], Any], count: int = 1) -> Any:
        @functools.wraps(original, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            mapped = [_like(path, map_path(path)) for path in args[:count]]
            return original(*mapped, *args[count:], **kwargs)

        return call

    def remove(original: Any) -> Any:
        def call(path: Any) -> Any:
            return None if stores.removed(path) else original(_like(path, stores.shadow(path)))

        return call

    def children(original: Any) -> Any:
        def call(path: Any) -> Any:
            if not stores.has(path):
                return original(path)
            return os.listdir(stores.shadow(path))

        return call

    for name in ('FileExists', 'ReadFileToString', 'IsDirectory', 'Stat', 'BufferedInputStream'):
        yield module, name, paths(getattr(module, name), stores.seen)
    for name in ('WriteStringToFile', 'CreateDir', 'RecursivelyCreateDir', 'WritableFile'):
        yield module, name, paths(getattr(module, name), stores.written)
    for name in ('RenameFile', 'CopyFile'):
        yield module, name, paths(getattr(module, name), stores.written, count=2)
    for name in ('DeleteFile', 'DeleteRecursively'):
        yield module, name, remove(getattr(module, name))
    yield module, 'GetChildren', children(module.GetChildren)


def _replace_records(stores: Stores, module: Any) -> Iterator[Replacement]:
    original = module.TFRecordWriter.__init__

    def make(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        original(self, stores.written(path), *args, **kwargs)

    yield module.TFRecordWriter, '__init__', make


def _replace_summaries(stores: Stores, module: Any) -> Iterator[Replacement]:
    original = module.create_summary_file_writer

    def create(*args: Any, logdir: Any, **kwargs: Any) -> Any:
        path = logdir.numpy() if hasattr(logdir, 'numpy') else logdir
        return original(*args, logdir=stores.written(path), **kwargs)

    yield module, 'create_summary_file_writer', create


def _like(given: Any, path: Any) -> Any:
    """A path as bytes if another one is, as TensorFlow wants them."""
    return os.fsencode(path) if isinstance(given, bytes) else path
