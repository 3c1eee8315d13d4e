"""Finds the stored array for each array of a state, and everything in which the two differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp

from partitioning.rules import nearest
from train.checkpoints.arrays.stored import HasShape, is_floating
from train.checkpoints.config import Renames, RestoreConfig
from train.errors import ConfigError

Kind = Literal['missing', 'extra', 'shape', 'dtype']


Array = TypeVar('Array', bound=HasShape)
Wanted = Mapping[str, jax.ShapeDtypeStruct]
# Makes the arrays of a new run at some paths.
Initialize = Callable[[Collection[str]], Mapping[str, jax.Array]]


class Difference(NamedTuple):
    """An array of a checkpoint that is not the same in a run.

    Attributes:
      name: its name, or the name of the run's array if the settings rename it.
      kind: what differs. An array is 'missing' in the checkpoint, or 'extra' in it.
      stored: its shape and dtype in the checkpoint, or why it is not there.
      wanted: its shape and dtype in the run, or 'absent'.
      is_allowed: whether the settings say what to do: initialize, ignore or convert.
    """

    name: str
    kind: Kind
    stored: str
    wanted: str
    is_allowed: bool


def match_arrays(
    stored: Mapping[str, Array],
    wanted: Wanted,
    restore: RestoreConfig,
    *,
    where: str,
    parts: tuple[str, ...] = ('',),
    casts: bool = False,
    adapt: Callable[[Array, jax.ShapeDtypeStruct, str], Array] = lambda array, wanted, name: array,
) -> tuple[dict[str, Array], list[Difference]]:
    """Finds the stored array for each array of a state.

    Args:
      stored: the arrays of a checkpoint, or what is known about them, by name.
      wanted: the arrays of the state, by the names that the checkpoint would give them.
      restore: the settings; `renames`, `strict` and `initialize_missing` are used.
      where: the checkpoint, for messages.
      parts: the beginnings of the names of the arrays to restore. Only these are compared.
      casts: whether floating-point dtypes may differ.
      adapt: changes the stored array for the wanted array of a name.

    Returns:
      The stored array of each array to restore, by the name of the latter, and what differs, in the
      order of the names.

    Raises:
      ConfigError: if a rename does not match any array, or names one that does not exist.
    """
    sources = find_sources(wanted, restore.renames, restore.renames_setting, 'array of this run')
    used = {source for source in sources.values() if source is not None}
    differences, found = list[Difference](), dict[str, Array]()
    for name in wanted:
        if not name.startswith(parts):
            continue
        source, ours = sources[name], wanted[name]
        if source is not None and source in stored:
            found[name] = theirs = adapt(stored[source], ours, name)
            renamed = '' if source == name else f' ({source})'
            text = f'{_show(theirs)} in the checkpoint{renamed}'
            if ours.shape != theirs.shape:
                differences.append(Difference(name, 'shape', text, _show(ours), False))
            elif ours.dtype != theirs.dtype:
                is_allowed = casts and is_floating(ours) and is_floating(theirs)
                differences.append(Difference(name, 'dtype', text, _show(ours), is_allowed))
        elif source not in (None, name):
            raise ConfigError(
                f'{restore.renames_setting}: {where} has no array {source}, from which {name} is '
                f'to be restored.{nearest(str(source), stored)}'
            )
        else:
            left_out = f'left out by {restore.renames_setting}'
            text = left_out if source is None else 'absent in the checkpoint'
            is_allowed = restore.initialize_missing
            differences.append(Difference(name, 'missing', text, _show(ours), is_allowed))
    for name in stored.keys() - used:
        if name.startswith(parts):
            text = f'{_show(stored[name])} in the checkpoint'
            differences.append(Difference(name, 'extra', text, 'absent', not restore.strict))
    return found, sorted(differences)


def find_sources(
    names: Iterable[str], renames: Renames, setting: str | None, kind: str = 'array'
) -> dict[str, str | None]:
    """The other name of each array, or None if the array is left out.

    Args:
      names: the names of the arrays.
      renames: pairs of a regular expression and the other name; see `RestoreConfig`.
      setting: the setting with the pairs. With None, a pattern need not match any array.
      kind: what the names belong to, for the message.

    Raises:
      ConfigError: if a pattern does not match any array.
    """
    unused, sources = dict(enumerate(renames)), dict[str, str | None]()
    for name in names:
        sources[name] = name
        for i, (pattern, replacement) in enumerate(renames):
            if match := re.fullmatch(pattern, name):
                sources[name] = None if replacement is None else match.expand(replacement)
                unused.pop(i, None)
                break
    if unused and setting is not None:
        pattern = next(iter(unused.values()))[0]
        raise ConfigError(
            f'{setting}: the pattern {pattern!r} matches no {kind}: remove it, or write a pattern '
            f'for whole names, such as {next(iter(sources), "")!r}'
        )
    return sources


def find_problem(
    differences: Collection[Difference], restore: RestoreConfig, *, where: str
) -> str | None:
    """Says in one line why a checkpoint cannot be restored, or returns None if it can."""
    wrong = [difference for difference in differences if not difference.is_allowed]
    if not wrong:
        return None
    names = {kind: {d.name for d in wrong if d.kind == kind} for kind in get_args(Kind)}
    # Optimizer states differ wherever parameters do, so they come last.
    first = min(
        wrong, key=lambda d: (d.name.startswith(('opt_state', 'state/')), d.name, d.kind == 'extra')
    )
    count = len({difference.name for difference in wrong})
    differ = (
        f'{count:,} arrays differ. The first is {first.name}: {first.stored}, {first.wanted} in '
        f'this run. Use the settings it was trained with, or another {restore.setting}'
    )
    if len(names['dtype']) == len(wrong):
        dtype = first.wanted.split()[-1]
        return (
            f'checkpoint {where} has other dtypes: {differ}, or set {restore.dtype_setting} = '
            f'{dtype!r} to convert them'
        )
    if not names['shape'] | names['dtype'] and names['missing'] >= names['extra']:
        differ += f', or set {restore.initialize_setting} = True'
    return f'checkpoint {where} belongs to another model or optimizer: {differ}'


def _show(array: HasShape) -> str:
    return f'{tuple(array.shape)} {jnp.dtype(array.dtype)}'
