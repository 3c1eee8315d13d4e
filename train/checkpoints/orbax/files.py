"""Reads the files of Orbax, without its checkpointers: any arrays, of any state, one by one."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from partitioning.untrusted_text import parse_json
from train.checkpoints.arrays.stored import Bounds, StoredArray, kvstore_of, open_stores
from train.checkpoints.steps.manifest import is_array_file
from train.checkpoints.steps.verifying import open_checked

# What Orbax calls a part of a tree that has no array.
NO_ARRAY = ('None', 'Dict', 'List', 'Tuple', 'NamedTuple', 'string')
# The file with the shape, the dtype and the chunks of an array.
_DESCRIPTIONS = {'zarr': '.zarray', 'zarr3': 'zarr.json'}


def read_orbax(folder: epath.Path) -> dict[str, StoredArray]:
    """Opens the arrays of a folder of Orbax by name: their keys in the saved tree, joined by '/'.

    `folder` is the folder of one item, such as `<step>/state`. If the step has a manifest, every
    file is checked against it before it is read. Raises a DamagedCheckpoint, also when the arrays
    are read, if a file does not have the content that was written, and exceptions of TensorStore
    and json if files are missing or damaged.
    """
    checked = open_checked(folder.parent)
    if checked is not None:
        checked.check([f'{folder.name}/_METADATA'])
    metadata = parse_json((folder / '_METADATA').read_text())
    folders = {
        '/'.join(map(str, keys)): '.'.join(map(str, keys))
        for text, entry in metadata['tree_metadata'].items()
        if entry.get('value_metadata', {}).get('value_type') not in NO_ARRAY
        for keys in [ast.literal_eval(text)]
    }
    kvstore, specs = kvstore_of(folder), {}
    driver = 'zarr3' if metadata.get('use_zarr3') else 'zarr'
    # Early versions of Orbax do not record it.
    in_database = metadata.get('use_ocdbt', (folder / 'manifest.ocdbt').exists())
    for name, part in folders.items():
        store = {**kvstore, 'path': f'{kvstore["path"]}{part}/'}
        if in_database:
            store = {'driver': 'ocdbt', 'base': kvstore, 'path': f'{part}/'}
        specs[name] = {'driver': driver, 'kvstore': store}
    if checked is None:
        return open_stores(specs)
    if in_database:
        # Any of its files can contain parts of any array. It has checksums of its own metadata.
        files = [file for file in checked.manifest.files if is_array_file(file)]
        return open_stores(specs, lambda name, store, bounds: checked.check(files))
    paths = {name: f'{folder.name}/{part}' for name, part in folders.items()}
    checked.check_together(f'{path}/{_DESCRIPTIONS[driver]}' for path in paths.values())

    described = dict[str, Any]()  # the metadata of each array, which many pieces need

    def describe(name: str, store: Any) -> Any:
        if name not in described:
            described[name] = store.spec().to_json()['metadata']
        return described[name]

    def list_files(name: str, store: Any, bounds: Bounds) -> list[str]:
        chunk = store.chunk_layout.write_chunk.shape or ()
        files = _chunk_files(describe(name, store), chunk, bounds)
        return [f'{paths[name]}/{file}' for file in files]

    def check(name: str, store: Any, bounds: Bounds) -> None:
        checked.check(list_files(name, store, bounds))

    def read_file(name: str, store: Any, bounds: Bounds, out: np.ndarray) -> bool:
        chunk = store.chunk_layout.write_chunk.shape or ()
        if not _is_plain_chunk(describe(name, store), chunk, bounds):
            return False
        [file] = list_files(name, store, bounds)
        return checked.read_into(file, out)

    return open_stores(specs, check, read_file)


def _is_plain_chunk(metadata: Any, chunk: Sequence[int], bounds: Bounds) -> bool:
    """Whether a slice is one whole chunk, whose file has its values in order and nothing else."""
    return (
        metadata.get('zarr_format', 2) == 2
        and metadata.get('compressor') is None
        and not metadata.get('filters')
        and metadata.get('order', 'C') == 'C'
        and not str(metadata.get('dtype')).startswith('>')
        and all(
            first % size == 0 and last - first == size
            for (first, last), size in zip(bounds, chunk, strict=True)
        )
    )


def _chunk_files(metadata: Any, chunk: Sequence[int], bounds: Bounds) -> list[str]:
    """The files of the chunks that a slice needs, below the folder of the array."""
    numbers = [
        range(first // size, -(-last // size))
        for (first, last), size in zip(bounds, chunk, strict=True)
    ]
    if metadata.get('zarr_format', 2) == 2:
        separator = metadata.get('dimension_separator', '.')
        return [separator.join(map(str, place)) or '0' for place in itertools.product(*numbers)]
    encoding = metadata['chunk_key_encoding']
    separator = encoding.get('configuration', {}).get('separator', '/')
    return [separator.join(['c', *map(str, place)]) for place in itertools.product(*numbers)]


# The trees that Orbax saves: dicts and lists of arrays, in which a part may be empty.


class _Key(NamedTuple):
    name: str
    is_index: bool


def read_tree(folder: epath.Path) -> Any:
    """Reads the tree that Orbax has written into the folder of an item, such as `<step>/state`.

    Returns dicts and lists, with the name of an array in its place, and None where a part is empty.
    A name is the keys of an array in the tree, joined by '/'.
    """
    root: dict[Any, Any] = {}
    for entry in parse_json((folder / '_METADATA').read_text())['tree_metadata'].values():
        keys = [_Key(str(key['key']), key['key_type'] == 1) for key in entry['key_metadata']]
        has_array = entry.get('value_metadata', {}).get('value_type') not in NO_ARRAY
        leaf = '/'.join(key.name for key in keys) if has_array else None
        _put(root, keys, leaf)
    return _with_lists(root)


def make_tree(names: Iterable[str]) -> Any:
    """The tree of dicts that gives arrays these names."""
    root: dict[Any, Any] = {}
    for name in names:
        _put(root, [_Key(key, False) for key in name.split('/')], name)
    return _with_lists(root)


def has_structure(tree: Any) -> bool:
    """Whether a tree has lists or empty parts, which names of arrays alone do not tell."""
    return tree is not None and tree != make_tree(jax.tree.leaves(tree))


def _put(root: dict[Any, Any], keys: list[_Key], leaf: str | None) -> None:
    """Adds a leaf to a tree of dicts."""
    parent = root
    for key in keys[:-1]:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            raise ValueError(f'{leaf} is below {parent}, which is an array')
    if keys[-1] in parent:
        raise ValueError(f'{leaf} is an array, but other arrays are below it')
    parent[keys[-1]] = leaf


def _with_lists(tree: Any) -> Any:
    """The tree with a list for every dict whose keys are indices, and names as keys elsewhere."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(key.is_index for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree, key=lambda key: int(key.name))]
    return {key.name: _with_lists(value) for key, value in tree.items()}
