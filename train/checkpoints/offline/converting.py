"""Converts checkpoints from one format to another, array by array."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from partitioning.amounts import bytes_str
from train.checkpoints.arrays.stored import StoredArray, in_memory, is_floating, with_dtype
from train.checkpoints.config import AVERAGES, Renames
from train.checkpoints.formats.opening import Checkpoint, Format, other_content
from train.checkpoints.formats.safetensors_writer import write_safetensors
from train.checkpoints.formats.t5x_files import is_t5x, sources_for_t5x, sources_in_t5x
from train.checkpoints.huggingface.architectures import ModelConfig
from train.checkpoints.huggingface.folders import open_parameters
from train.checkpoints.huggingface.writer import PlannedModel, plan_model
from train.checkpoints.matching import find_sources
from train.checkpoints.orbax.files import has_structure, make_tree
from train.checkpoints.steps import record
from train.checkpoints.steps.manifest import complete_step
from train.checkpoints.steps.record import TEMPORARY
from train.errors import ConfigError, first_line
from train.paths import is_remote


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """A planned conversion: what will be written, and where, to a folder that does not exist yet.

    Attributes:
      tree: the tree of the names of arrays for Orbax.
      lost: what the source has and the result does not, one entry for each kind of thing.
      model: the Hugging Face model that is written, if that is the format.
    """

    source: Checkpoint
    format: Format
    folder: epath.Path
    step: int
    arrays: Mapping[str, StoredArray]
    tree: Any
    lost: Sequence[str]
    model: PlannedModel | None = None

    @property
    def num_bytes(self) -> int:
        """The size of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


def plan_conversion(
    source: Checkpoint,
    to: epath.Path,
    format: Format,
    *,
    renames: Renames = (),
    dtype: str | None = None,
    model: ModelConfig | None = None,
    like: epath.Path | None = None,
) -> Conversion:
    """Plans a conversion, and checks that it is possible. No array is read or written.

    Args:
      to: where to: the folder of a run for 'meshwright' and 't5x', to which a step is added, or
        the new folder of that step; a new folder for the others.
      renames: as in `RestoreConfig`, but of names in the new format. An empty new name leaves the
        array out.
      dtype: the dtype of floating-point parameters, by default their own.
      model, like: for 'huggingface'; see `plan_model`.

    Raises:
      ConfigError: if the result exists, or the format cannot have the arrays.
    """
    if source.place.format == 'huggingface':
        named = {'step': in_memory(np.int32(0)), **open_parameters(source.place.path)}
        source = dataclasses.replace(source, arrays=named)
        if format == 'huggingface':  # A model that is converted to itself keeps its form.
            like = like or source.place.path
    folder, step = _find_destination(to, format, source)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f'{folder} exists already: write to another place, or move it away')
    sources, lost = _rename(_sources(source.arrays, format), renames)
    arrays: Mapping[str, StoredArray] = {n: source.arrays[old] for n, old in sources.items()}
    _check_names(arrays, format, source.place.path)
    if dtype is not None:  # States of optimizers keep their dtypes.
        arrays = {
            name: with_dtype(x, np.dtype(dtype), name)
            if not name.startswith(('opt_state/', 'state/', AVERAGES)) and is_floating(x)
            else x
            for name, x in arrays.items()
        }
    planned = None
    if format == 'huggingface':
        if model is None and like is None:
            raise ConfigError(
                f'{source.place.path} does not say which model it has: give the folder of the '
                'model from which the run has started, with --like=FOLDER'
            )
        planned = plan_model(arrays, model=None if like else model, like=like, dtype=dtype)
        if others := arrays.keys() - planned.arrays.keys():
            lost.append(f'{len(others):,} arrays besides parameters, such as {min(others)}')
        arrays = planned.arrays
    keeps_names = sources == {name: name for name in source.arrays}
    tree = source.tree if keeps_names and source.tree is not None else make_tree(arrays)
    return Conversion(
        source=source,
        format=format,
        folder=folder,
        step=step,
        arrays=arrays,
        tree=tree,
        lost=[*lost, *_find_lost(source, format)],
        model=planned,
    )


def with_names_of(first: Checkpoint, second: Checkpoint) -> Mapping[str, StoredArray]:
    """The arrays of the second checkpoint, under the names that the first one would give them.

    They keep their names unless one of the two is of this package, and the other is of T5X or
    Hugging Face.
    """
    if second.place.format == 'huggingface' != first.place.format:
        return open_parameters(second.place.path, first.arrays)
    sources = _sources(second.arrays, first.place.format)
    if {first.place.format, second.place.format} != {'meshwright', 't5x'}:
        return second.arrays
    return {name: second.arrays[source] for name, source in sources.items()}


def _find_destination(to: epath.Path, format: Format, source: Checkpoint) -> tuple[Any, int]:
    """The folder that is written, and its step."""
    known = source.step()
    prefix, folder = {'meshwright': ('', to / 'checkpoints'), 't5x': ('checkpoint_', to)}.get(
        format, (None, to)
    )
    if prefix is None:
        return to, known or 0
    named = re.fullmatch(f'{prefix}(0|[1-9][0-9]*)', to.name)
    if named is None:
        return folder / f'{prefix}{known or 0}', known or 0
    if known not in (None, int(named[1])):
        raise ConfigError(f'{source.place.path} is of step {known}, and {to} names another step')
    return to, int(named[1])


def _sources(names: Collection[str], format: Format) -> dict[str, str]:
    """The name in the source of each array, by its name in the new format."""
    if format in ('meshwright', 'huggingface') and is_t5x(names):
        return sources_in_t5x(names)
    if format == 't5x' and not is_t5x(names):
        return sources_for_t5x(names)
    return {name: name for name in names}


def _rename(sources: Mapping[str, str], renames: Renames) -> tuple[dict[str, str], list[str]]:
    """Renames arrays, and says which are left out."""
    renamed, left_out = dict[str, str](), list[str]()
    for name, new in find_sources(sources, renames, '--renames').items():
        if not new:
            left_out.append(name)
        elif new in renamed:
            raise ConfigError(
                f'--renames gives two arrays the name {new!r}: {renamed[new]} and {sources[name]}'
            )
        else:
            renamed[new] = sources[name]
    if not renamed:
        raise ConfigError('--renames leaves out all arrays: keep one')
    if not left_out:
        return renamed, []
    return renamed, [f'{len(left_out):,} arrays that --renames leaves out, such as {left_out[0]}']


def _check_names(arrays: Mapping[str, StoredArray], format: Format, where: epath.Path) -> None:
    """Checks that a format can have arrays with these names and shapes."""
    if format == 't5x' and not is_t5x(arrays):
        raise ConfigError(
            f'{where} has no parameters below params/ or target/, where T5X has them: give '
            f"--renames='(.*)=target/\\1', for example"
        )
    if format != 'safetensors' and format != 'huggingface':
        for name, array in arrays.items():
            if not array.size:
                raise ConfigError(
                    f'{name} of shape {array.shape} has no elements, and Orbax cannot save it: '
                    f"leave it out with --renames='{re.escape(name)}='"
                )
        try:
            make_tree(arrays)
        except ValueError as error:
            raise ConfigError(f'Orbax saves trees, but {error}: use --renames') from error


def _find_lost(source: Checkpoint, format: Format) -> list[str]:
    """Lists what a checkpoint has next to its arrays and the new one does not keep."""
    lost = other_content(source.place)
    if format == 'meshwright':  # The new step has a record with the same files.
        lost = [name for name in lost if not name.startswith(f'{record.ITEM}/')]
    if format == 'safetensors' and has_structure(source.tree):
        lost.append('which parts of the tree are lists, and which are empty')
    return lost


# Writing.


def write(conversion: Conversion, report: Callable[[int], None]) -> None:
    """Writes the result of a conversion. Few of its arrays are in memory at a time.

    `report` receives the bytes of every piece that has been written. Raises a ConfigError if the
    source is damaged, or the result cannot be written. What has been written is removed.
    """
    try:
        if conversion.format == 'safetensors':
            write_safetensors(conversion.folder, conversion.arrays, report)
        elif conversion.model is not None:
            conversion.model.write(conversion.folder, report)
        else:
            _write_orbax(conversion, report)
    except BaseException as error:
        folder = conversion.folder
        if not is_remote(folder):  # Orbax would have renamed it at the end. Nobody else writes it.
            shutil.rmtree(folder.parent / f'{folder.name}{TEMPORARY}', ignore_errors=True)
        if isinstance(error, ConfigError) or not isinstance(error, Exception):
            raise
        reason = first_line(error)
        if (full := os.strerror(errno.ENOSPC)) in reason:  # TensorStore names files, too.
            reason = f'{full}, and the arrays need {bytes_str(conversion.num_bytes)}'
        raise ConfigError(f'{folder} cannot be written: {reason}') from error


def _write_orbax(conversion: Conversion, report: Callable[[int], None]) -> None:
    # Orbax starts a backend of jax, for which a machine that converts needs no accelerator.
    from train.checkpoints.orbax.copies import write_arrays

    folder, step = conversion.folder, conversion.step
    tree = jax.tree.map(conversion.arrays.__getitem__, conversion.tree)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if conversion.format == 'orbax':
        write_arrays(folder, tree, report)
        return
    texts: dict[str, Mapping[str, str]] = {'dataset': {}}
    if conversion.format == 'meshwright':
        known = record.read_record(conversion.source.place.path) or record.StepRecord(step=step)
        texts = {record.ITEM: dataclasses.replace(known, previous=None).files()}
    write_arrays(folder, tree, report, texts)
    complete_step(folder, step)
