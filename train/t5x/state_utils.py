"""T5X's `state_utils`: functions for `utils.RestoreCheckpointConfig.state_transformation_fns`.

Such a function gets the arrays of a checkpoint and the arrays of the run, each as a tree with T5X's
names, and returns a tree of arrays of the checkpoint. It can rename, drop and exchange them. They
are not read until later, so it cannot compute with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import traverse_util

from train.checkpoints import RestoreConfig
from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.matching import find_sources
from train.errors import ConfigError, first_line

SETTING = 'utils.RestoreCheckpointConfig.state_transformation_fns'


def apply_assignment_map(
    ckpt_optimizer_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    assignment_map: Sequence[tuple[str, str | None]] = (),
    require_all_rules_match: bool = True,
    *,
    is_resuming: bool = False,
) -> dict[str, Any]:
    """Renames the arrays of a checkpoint.

    Returns the tree of the run's names. Arrays of the checkpoint that no pair uses keep their
    names. Raises a ConfigError if a pair matches no array, or the checkpoint lacks an array.

    Args:
      ckpt_optimizer_state: the arrays of the checkpoint, as a tree.
      optimizer_state: the arrays of the run, as a tree.
      assignment_map: pairs of a regular expression, which must match the whole name of an array of
        the run, such as 'target/(.*)', and its name in the checkpoint. None leaves the array out.
      require_all_rules_match: whether it is an error if a pair matches no array.
      is_resuming: whether the checkpoint is of the same run. Then nothing is renamed.
    """
    stored = _flatten(ckpt_optimizer_state)
    if is_resuming:
        return _unflatten(stored)
    restore = RestoreConfig(path='T5X', renames=tuple((a, b) for a, b in assignment_map))
    setting = restore.renames_setting if require_all_rules_match else None
    names = _flatten(optimizer_state)
    sources = find_sources(names, restore.renames, setting, 'array of this run')
    used = {source for name, source in sources.items() if source != name}
    dropped = {name for name, source in sources.items() if source is None}
    renamed = {name: array for name, array in stored.items() if name not in used | dropped}
    for name, source in sources.items():
        if source in stored:
            renamed[name] = stored[source]
        elif source not in (None, name):
            raise ConfigError(f'{SETTING}: the checkpoint has no array {source} for {name}')
    return _unflatten(renamed)


def transform(
    functions: Sequence[Callable[..., Any]],
    stored: Mapping[str, StoredArray],
    wanted: Mapping[str, Any],
) -> dict[str, StoredArray]:
    """Applies functions that rename the arrays of a checkpoint, in their order.

    They take the trees of the checkpoint and of the run, which are given as arrays by name. Raises
    a ConfigError if a function fails, or returns anything but arrays of the checkpoint.
    """
    arrays = dict(stored)
    for function in functions:
        name = getattr(function, '__name__', type(function).__name__)
        given = {'is_resuming': False}
        if 'is_resuming' not in inspect.signature(function).parameters:
            given = {}
        try:
            arrays = _flatten(function(_unflatten(arrays), _unflatten(wanted), **given))
        except ConfigError:
            raise
        except Exception as error:  # Anything that a function of the user raises.
            raise ConfigError(
                f'{SETTING}: {name} fails ({first_line(error)}); arrays are read after it, so it '
                'can rename them, but not compute with them'
            ) from error
        if wrong := [key for key, x in arrays.items() if not isinstance(x, StoredArray)]:
            raise ConfigError(
                f'{SETTING}: {name} makes {wrong[0]}, which is not an array of the checkpoint; it '
                'can rename arrays, but not compute with them'
            )
    return arrays


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep='/')


def _unflatten(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.unflatten_dict(dict(arrays), sep='/')
