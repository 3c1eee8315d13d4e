"""Reads the files of Orbax, without its checkpointers: any arrays, of any state, one by one."""

from __future__ import annotations

import ast
import json

from etils import epath

from train.checkpoints.orbax_trees import NO_ARRAY
from train.checkpoints.stored import StoredArray, kvstore_of, open_stores


def read_orbax(folder: epath.Path) -> dict[str, StoredArray]:
    """Opens the arrays that Orbax has written into a folder.

    Args:
      folder: the folder of one item, such as `<step>/state`.

    Returns:
      The arrays by name: their keys in the saved tree, joined by '/'.

    Raises:
      Exception: if files are missing or damaged. TensorStore and json raise many types.
    """
    metadata = json.loads((folder / '_METADATA').read_text())
    kvstore = kvstore_of(folder)
    driver = 'zarr3' if metadata.get('use_zarr3') else 'zarr'
    # Early versions of Orbax do not record it.
    use_ocdbt = metadata.get('use_ocdbt', (folder / 'manifest.ocdbt').exists())
    specs = {}
    for text, entry in metadata['tree_metadata'].items():
        if entry.get('value_metadata', {}).get('value_type') in NO_ARRAY:
            continue
        keys = [str(key) for key in ast.literal_eval(text)]
        store = {**kvstore, 'path': kvstore['path'] + '.'.join(keys) + '/'}
        if use_ocdbt:
            store = {'driver': 'ocdbt', 'base': kvstore, 'path': '.'.join(keys) + '/'}
        specs['/'.join(keys)] = {'driver': driver, 'kvstore': store}
    return open_stores(specs)
