"""Finds the stored array for each array of a state, and reads it onto its devices."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from partitioning.rules import nearest
from train.checkpoints.restore import RestoreConfig
from train.checkpoints.stored import StoredArray, place
from train.errors import ConfigError


class HasShape(Protocol):
    """An array, or what is known about one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


Array = TypeVar('Array', bound=HasShape)
Wanted = Mapping[str, jax.ShapeDtypeStruct]
MAX_BYTES_IN_FLIGHT = 2**31


class Matched(NamedTuple, Generic[Array]):
    """The result of `match_arrays`.

    Attributes:
      arrays: the stored array of each array to restore. Those to initialize are left out.
      unused: the names of the arrays of the checkpoint that are not restored, sorted.
    """

    arrays: dict[str, Array]
    unused: list[str]


def match_arrays(
    stored: Mapping[str, Array],
    wanted: Wanted,
    restore: RestoreConfig,
    *,
    where: str,
    parts: tuple[str, ...] = ('',),
    casts: bool = False,
    adapt: Callable[[Array, jax.ShapeDtypeStruct, str], Array] = lambda array, wanted, name: array,
) -> Matched[Array]:
    """Finds the stored array for each array of a state.

    Args:
      stored: the arrays of a checkpoint, or what is known about them, by name.
      wanted: the arrays of the state, by the names that the checkpoint would give them.
      restore: the settings, of which `renames`, `strict` and `initialize_missing` count.
      where: the checkpoint, for messages.
      parts: the beginnings of the names of the arrays to restore. Only these are compared.
      casts: whether floating-point dtypes may differ.
      adapt: changes the stored array for the wanted array of a name.

    Raises:
      ConfigError: if arrays differ or are missing, or if a rename does not match any.
    """
    sources = find_sources(wanted, restore)
    used = {source for source in sources.values() if source is not None}
    differing, found = dict[str, str](), dict[str, Array]()
    num_missing = 0
    for name in wanted:
        if not name.startswith(parts):
            continue
        source = sources[name]
        if source is not None and source in stored:
            ours = wanted[name]
            theirs = adapt(stored[source], ours, name)
            if ours.shape != theirs.shape or not _same_dtype(ours.dtype, theirs.dtype, casts):
                renamed = '' if source == name else f' ({source})'
                differing[name] = f'{_show(theirs)} in the checkpoint{renamed}, {_show(ours)}'
            found[name] = theirs
        elif source not in (None, name):
            raise ConfigError(
                f'{restore.renames_setting}: {where} has no array {source}, from which {name} is '
                f'to be restored.{nearest(str(source), stored)}'
            )
        elif not restore.initialize_missing:
            left_out = f'left out by {restore.renames_setting}'
            what = left_out if source is None else 'absent in the checkpoint'
            differing[name] = f'{what}, {_show(wanted[name])}'
            num_missing += 1
    unused = sorted(name for name in stored.keys() - used if name.startswith(parts))
    for name in unused if restore.strict else ():
        differing[name] = f'{_show(stored[name])} in the checkpoint, absent'
    if differing:
        only_missing = num_missing == len(differing)
        raise _belongs_to_another(where, restore, differing, only_missing)
    return Matched(found, unused)


def find_sources(
    wanted: Wanted, restore: RestoreConfig, *, all_used: bool = True
) -> dict[str, str | None]:
    """The name in the checkpoint of each array, or None if it is not restored.

    Args:
      wanted: the arrays of the state, by name.
      restore: the settings, of which `renames` counts.
      all_used: whether it is an error if a rename does not match any array.

    Raises:
      ConfigError: if a rename does not match any array.
    """
    unused, sources = dict(enumerate(restore.renames)), dict[str, str | None]()
    for name in wanted:
        sources[name] = name
        for i, (pattern, replacement) in enumerate(restore.renames):
            if match := re.fullmatch(pattern, name):
                sources[name] = None if replacement is None else match.expand(replacement)
                unused.pop(i, None)
                break
    if unused and all_used:
        pattern = next(iter(unused.values()))[0]
        raise ConfigError(
            f'{restore.renames_setting}: the pattern {pattern!r} matches no array of this run: '
            f'remove it, or write a pattern for whole names, such as {next(iter(wanted), "")!r}'
        )
    return sources


def _same_dtype(ours: Any, theirs: Any, casts: bool) -> bool:
    return ours == theirs or (
        casts and jnp.issubdtype(ours, jnp.floating) and jnp.issubdtype(theirs, jnp.floating)
    )


def _show(array: Any) -> str:
    return f'{tuple(array.shape)} {jnp.dtype(array.dtype)}'


def _belongs_to_another(
    where: str, restore: RestoreConfig, differing: Mapping[str, str], only_missing: bool
) -> ConfigError:
    # Optimizer states differ wherever parameters do, so they come last.
    first = min(differing, key=lambda name: (name.startswith(('opt_state', 'state/')), name))
    hint = f', or set {restore.initialize_setting} = True' if only_missing else ''
    return ConfigError(
        f'checkpoint {where} belongs to another model or optimizer: {len(differing):,} arrays '
        f'differ. The first is {first}: {differing[first]} in this run. Use the settings it was '
        f'trained with, or another {restore.setting}{hint}'
    )


def read_all(stored: Mapping[str, StoredArray], wanted: Wanted) -> dict[str, jax.Array]:
    """Reads arrays onto their devices, a few GiB at a time.

    Args:
      stored: the arrays to read, by name.
      wanted: their dtypes and shardings.
    """
    reading: deque[tuple[str, int, Callable[[], jax.Array]]] = deque()
    arrays, in_flight = dict[str, jax.Array](), 0
    for name in stored:
        struct = wanted[name]
        size = struct.size * struct.dtype.itemsize
        while reading and in_flight + size > MAX_BYTES_IN_FLIGHT:
            first, first_size, finish = reading.popleft()
            arrays[first], in_flight = finish(), in_flight - first_size
        reading.append((name, size, place(stored[name], struct)))
        in_flight += size
    for name, _, finish in reading:
        arrays[name] = finish()
    return arrays


# Makes the arrays of a new run at some paths.
Initialize = Callable[[Collection[str]], Mapping[str, jax.Array]]
