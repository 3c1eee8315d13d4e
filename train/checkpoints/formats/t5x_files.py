"""Reads the two formats of T5X's checkpoints, without loading any array.

A checkpoint is a folder `checkpoint_<step>`. In the format of Orbax, it contains the folder `state`
with a store of arrays; in the older one, a msgpack file `checkpoint` and a folder for each array.
Very old checkpoints are one msgpack file with all arrays in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from etils import epath
from flax import serialization, traverse_util

from train.checkpoints.arrays.stored import (
    StoredArray,
    as_bfloat16,
    in_memory,
    kvstore_of,
    open_stores,
)
from train.checkpoints.orbax.files import read_orbax
from train.checkpoints.steps.finding import t5x_format
from train.errors import ConfigError, first_line
from train.paths import as_path

Arrays = dict[str, StoredArray]

OLDEST_VERSION, NEWEST_VERSION = 2, 3
STEP = 'state/step'
STATISTICS = ('m', 'v', 'v_col', 'v_row')


def read_arrays(path: Any) -> Arrays:
    """Opens the arrays of a T5X checkpoint of either format by name, such as 'target/encoder/...'.

    `path` is the folder `checkpoint_<step>`, or the one file of an old checkpoint. Parameters are
    below 'target/', the state of the optimizer is below 'state/param_states/', and the step is
    'state/step'. Values are read when they are needed. Raises a ConfigError if there is no T5X
    checkpoint, or it is damaged.
    """
    folder = as_path('the path of a T5X checkpoint', path)
    kind = t5x_format(folder)
    if kind is None:
        raise ConfigError(f'{folder} is not a T5X checkpoint (expected .../checkpoint_<step>)')
    try:
        return read_orbax(folder / 'state') if kind == 'orbax' else _read_legacy(folder)
    except ConfigError:
        raise
    except Exception as error:  # msgpack, json and tensorstore raise many types.
        raise ConfigError(
            f'the T5X checkpoint {folder} is damaged ({first_line(error)}): use another one'
        ) from error


def _read_legacy(path: epath.Path) -> Arrays:
    """Opens the arrays of a checkpoint in T5X's own format."""
    file = path / 'checkpoint' if path.is_dir() else path
    content = serialization.msgpack_restore(file.read_bytes())
    if not isinstance(content, Mapping):
        raise ConfigError(f'{file} is not a T5X checkpoint: it contains no map')
    version = content.get('version', OLDEST_VERSION)
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        raise ConfigError(
            f'the T5X checkpoint {path} has version {version}: only {OLDEST_VERSION} and '
            f'{NEWEST_VERSION} can be read'
        )
    tree = {k: v for k, v in content.get('optimizer', content).items() if k != 'version'}
    arrays, specs = Arrays(), dict[str, dict[str, Any]]()
    for keys, leaf in traverse_util.flatten_dict(tree, is_leaf=_is_spec).items():
        name = '/'.join(map(str, keys))
        if isinstance(leaf, Mapping):
            # The file names the folder of the array as it was when it was written, on a file system
            # or in a bucket. The array is always a folder of the checkpoint. Its chunks and its
            # compression are in the file next to them.
            kvstore = str(leaf['kvstore'].get('path', leaf.get('path', '')))
            place = kvstore_of(file.parent / kvstore.rstrip('/').rpartition('/')[2])
            specs[name] = {'driver': leaf['driver'], 'kvstore': place}
        elif leaf is not None:
            arrays[name] = in_memory(np.asarray(leaf))
    arrays |= open_stores(specs)
    # Version 2 has no dtype for bfloat16. T5X's states have no other arrays of uint16.
    return {k: as_bfloat16(x) if x.dtype == np.uint16 else x for k, x in arrays.items()}


def _is_spec(path: Any, tree: Mapping[str, Any]) -> bool:
    """Whether a map in a tree is the specification of an array."""
    return {'driver', 'kvstore'} <= tree.keys()


# The names of arrays in T5X and in this package. A checkpoint that is converted has only names, so
# Adafactor is recognized by its four statistics of each parameter. `train.t5x.checkpoints` has the
# state of a run, which says where Adafactor is.


def is_t5x(names: Collection[str]) -> bool:
    """Whether a T5X checkpoint has arrays with these names."""
    return any(name.startswith('target/') for name in names)


def sources_in_t5x(names: Collection[str]) -> dict[str, str]:
    """For each name that this package gives to an array of a T5X checkpoint, the name in T5X.

    The step is two arrays here if the optimizer is T5X's Adafactor, which counts its own steps.
    """
    parameters = [name.removeprefix('target/') for name in names if name.startswith('target/')]
    statistics = [f'state/param_states/{path}/{s}' for path in parameters for s in STATISTICS]
    is_adafactor = bool(statistics) and set(statistics) <= set(names)
    sources = {'opt_state/step': STEP} if is_adafactor and STEP in names else {}
    for name in names:
        of_optimizer = name.removeprefix('state/param_states/')
        path, _, statistic = of_optimizer.rpartition('/')
        if name == STEP:
            ours = 'step'
        elif name.startswith('target/'):
            ours = f'params/{name.removeprefix("target/")}'
        elif of_optimizer == name:
            ours = name
        else:
            ours = f'opt_state/{statistic}/{path}' if is_adafactor else f'opt_state/{of_optimizer}'
        sources[ours] = name
    return sources


def sources_for_t5x(names: Collection[str]) -> dict[str, str]:
    """For each name that T5X gives to an array of a checkpoint of this package, the name here."""
    known, adafactors = set(names), set[str]()
    for name in names:
        match = re.fullmatch(r'(opt_state(?:/.+?)??)/(?:m|v|v_col|v_row)/(.+)', name)
        if match and {f'{match[1]}/step', f'params/{match[2]}'} <= known:
            adafactors.add(match[1])
    counts = {f'{start}/step' for start in adafactors}
    return {name_in_t5x(name, adafactors): name for name in names if name not in counts}


def name_in_t5x(name: str, adafactors: Collection[str]) -> str:
    """T5X's name of an array.

    The parameter params/encoder/norm/scale is target/encoder/norm/scale. Its second moment in T5X's
    Adafactor is state/param_states/encoder/norm/scale/v. T5X has one number of steps, so the count
    of that Adafactor is state/step as well. The state of any other optax transformation has the
    path that T5X gives it, state/param_states/<path in the state of the transformation>.
    `adafactors` says where the states of T5X's Adafactor are, such as 'opt_state/0'.
    """
    field, _, rest = name.partition('/')
    if field == 'step':
        return STEP
    if field == 'params':
        return f'target/{rest}'
    if field != 'opt_state':
        return name
    for start in adafactors:
        if name.startswith(f'{start}/'):
            statistic, _, parameter = name.removeprefix(f'{start}/').partition('/')
            return f'state/param_states/{parameter}/{statistic}' if parameter else STEP
    return f'state/param_states/{rest}'
