"""Finds the stored array for each array of a run, and the differences, without reading arrays."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from rich.table import Table

from partitioning.amounts import bytes_str
from partitioning.rules import nearest
from train.checkpoints.arrays.placing import by_size, find_shares
from train.checkpoints.arrays.stored import Bounds, HasShape, StoredArray, is_floating
from train.checkpoints.config import AVERAGES, Renames, RestoreConfig
from train.errors import ConfigError
from train.reporting.console import RunConsole

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
      wanted: the arrays of the state, by the names that the checkpoint would give them.
      restore: the settings; `renames`, `strict` and `initialize_missing` are used.
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
    """The other name of each array, or None if the array is left out; see `RestoreConfig.renames`.

    Raises a ConfigError if a pattern does not match any array, unless `setting`, the setting with
    the pairs, is None. `kind` is what the names belong to, for the message.
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
    if all(d.kind == 'extra' and d.name.startswith(AVERAGES) for d in wrong):
        return (
            f'checkpoint {where} has the averages of the parameters, {len(wrong):,} arrays such as '
            f'{wrong[0].name}, but this run keeps none: set TrainConfig.ema_decay, or start a run '
            'with another MODEL_DIR and RestoreConfig.strict = False'
        )
    first = min(
        wrong,
        key=lambda d: (
            d.name.startswith(('opt_state', 'state/', AVERAGES)),
            d.name,
            d.kind == 'extra',
        ),
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


MAX_ROWS = 20
# What differs, and what happens with the array if the settings allow it.
_KINDS = {
    'missing': ('missing', 'initialized'),
    'extra': ('extra', 'not restored'),
    'dtype': ('other dtype', 'converted'),
    'shape': ('other shape', ''),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is known about a restore before any array is read. Sizes are in bytes.

    Attributes:
      num_bytes: the size of the arrays to restore, in the checkpoint without compression.
      process_bytes: what each process reads, by its index. A chunk that is read in part counts as a
        whole.
      problem: why the checkpoint cannot be restored, in one line, or None.
      is_verified: whether the checkpoint has a manifest, so that checksums are verified.
    """

    path: str
    num_arrays: int
    num_bytes: int
    process_bytes: tuple[int, ...]
    differences: tuple[Difference, ...]
    problem: str | None
    is_verified: bool

    @property
    def read_amplification(self) -> float:
        """The bytes that all processes read, divided by the bytes of the arrays."""
        return sum(self.process_bytes) / self.num_bytes if self.num_bytes else 1.0

    def check(self) -> None:
        """Raises a ConfigError if the checkpoint cannot be restored."""
        if self.problem is not None:
            raise ConfigError(self.problem)

    def report(self, console: RunConsole) -> None:
        """Prints one line, and a table if arrays differ."""
        console.say(self.describe())
        if self.differences:
            console.show(self.table())

    def describe(self) -> str:
        """The sizes in one line."""
        text = f'{self.num_arrays:,} arrays with {bytes_str(self.num_bytes)} to restore'
        if len(self.process_bytes) > 1:
            least, most = (bytes_str(f(self.process_bytes)) for f in (min, max))
            each = most if least == most else f'{least} to {most}'
            text += f', {each} per process'
        text += f'; read amplification {self.read_amplification:.2f}'
        counts = Counter((one.kind, one.is_allowed) for one in self.differences)
        for (kind, is_allowed), count in sorted(counts.items()):
            text += f'; {count:,} {_name(kind, is_allowed)}'
        return text if self.is_verified else f'{text}; without a manifest, nothing can be verified'

    def table(self) -> Table:
        """A table of the first arrays that differ."""
        table = Table(box=None, pad_edge=False, header_style='bold')
        for column in ('array', 'checkpoint', 'run', 'difference'):
            table.add_column(column, overflow='fold')
        # Whatever makes the restore fail comes first.
        rows = sorted(self.differences, key=lambda one: one.is_allowed)
        for one in rows[:MAX_ROWS]:
            difference = _name(one.kind, one.is_allowed)
            stored = one.stored.removesuffix(' in the checkpoint')
            table.add_row(one.name, stored, one.wanted, difference)
        if len(rows) > MAX_ROWS:
            table.add_row(f'and {len(rows) - MAX_ROWS:,} more', '', '', '')
        return table


def _name(kind: str, is_allowed: bool) -> str:
    """A difference and its consequence, in words."""
    name, consequence = _KINDS[kind]
    return f'{name}, {consequence if is_allowed else "an error"}'


def count_bytes(found: Mapping[str, StoredArray], wanted: Wanted) -> tuple[int, ...]:
    """The bytes that each process reads, by its index."""
    read = dict[int, int].fromkeys(range(jax.process_count()), 0)
    for number, name in enumerate(by_size(found)):
        array, chunks = found[name], set[tuple[int, Bounds]]()
        if array.shape != wanted[name].shape:
            continue
        for share in find_shares(array, wanted[name], number):
            for piece in share.pieces:
                whole = _whole_chunks(piece.bounds, array)
                chunks |= {(process, whole) for process in piece.readers}
        for process, bounds in chunks:
            size = math.prod(last - first for first, last in bounds)
            read[process] = read.get(process, 0) + size * array.dtype.itemsize
    return tuple(read[process] for process in sorted(read))


def _whole_chunks(bounds: Bounds, array: StoredArray) -> Bounds:
    """The smallest slice that consists of whole chunks and contains the one that is given."""
    if array.chunk is None:
        return bounds
    dimensions = zip(bounds, array.chunk, array.shape, strict=True)
    return tuple(
        (first // chunk * chunk, min(-(-last // chunk) * chunk, size))
        for (first, last), chunk, size in dimensions
    )
