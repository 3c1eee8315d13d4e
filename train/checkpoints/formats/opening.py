"""Which format is at a path, and the arrays of any of them, opened under their own names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
from etils import epath

from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.formats.safetensors_files import has_safetensors, open_safetensors
from train.checkpoints.formats.t5x_files import STEP, is_t5x, read_arrays
from train.checkpoints.orbax.files import read_orbax, read_tree
from train.checkpoints.steps.finding import examine, find_steps
from train.checkpoints.steps.manifest import DamagedCheckpoint, read_manifest
from train.checkpoints.steps.record import TEMPORARY
from train.checkpoints.steps.verifying import FoundStep
from train.errors import ConfigError, first_line

Format = Literal['meshwright', 't5x', 'orbax', 'safetensors', 'huggingface']
UNDERSTOOD = (
    'a step or the folder of a run, a checkpoint of T5X or Orbax, safetensors, or the folder of a '
    'Hugging Face model'
)
STEP_NAME = re.compile(r'(?:checkpoint_)?(0|[1-9]\d*)')


class Place(NamedTuple):
    """Where a checkpoint is, and who can read it.

    `items` are the folders of arrays below `path` if Orbax wrote them; '' is `path` itself.
    """

    path: epath.Path
    format: Format
    items: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """The step in the name of the folder, or None."""
        name = STEP_NAME.fullmatch(self.path.name)
        return int(name[1]) if name else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint of any format. Only its metadata has been read.

    Attributes:
      arrays: its arrays by their names in the file. If Orbax wrote several items, a name begins
        with its item.
      tree: the tree that Orbax saved, with names in the place of arrays, or None without Orbax.
    """

    place: Place
    arrays: Mapping[str, StoredArray]
    tree: Any = None

    def step(self) -> int | None:
        """The step, from the name of the folder or an array, or None if neither says it."""
        if self.place.step is not None:
            return self.place.step
        for name in ('step', STEP):
            array = self.arrays.get(name)
            if array is not None and array.size == 1 and array.dtype.kind in 'iu':
                return int(array.read().reshape(()))
        return None


def open_checkpoint(place: Place) -> Checkpoint:
    """Opens the arrays of a checkpoint, without reading any.

    Raises a ConfigError if its files are missing or damaged.
    """
    try:
        if place.items:
            items = {item: read_orbax(place.path / item) for item in place.items}
            trees = {item: read_tree(place.path / item) for item in place.items}
            if len(items) == 1:
                [arrays], [tree] = items.values(), trees.values()
                return Checkpoint(place=place, arrays=arrays, tree=tree)
            named = {f'{k}/{n}': x for k, arrays in items.items() for n, x in arrays.items()}
            tree = {k: jax.tree.map(lambda n, k=k: f'{k}/{n}', t) for k, t in trees.items()}
            return Checkpoint(place=place, arrays=named, tree=tree)
        read = read_arrays if place.format == 't5x' else open_safetensors
        return Checkpoint(place=place, arrays=read(place.path))
    except ConfigError:
        raise
    except Exception as error:  # json and TensorStore raise many types.
        raise ConfigError(f'checkpoint {place.path} is damaged ({first_line(error)})') from error


def find_place(path: epath.Path) -> Place | None:
    """Finds out which checkpoint is at a path, or returns None if there is none.

    A folder with several checkpoints, such as the folder of a run, is not one; see `list_steps`.
    """
    if not path.is_dir():
        return _find_file(path)
    if (path / '_METADATA').exists():
        return Place(path, 'orbax', ('',))
    children = sorted(child.name for child in path.iterdir())
    named = [name for name in children if not STEP_NAME.fullmatch(name)]
    items = tuple(name for name in named if (path / name / '_METADATA').exists())
    if items == ('state',):
        return Place(path, _format_of_state(path), items)
    if items:
        return Place(path, 'orbax', items)
    if (path / 'checkpoint').exists() and not (path / 'checkpoint').is_dir():
        return Place(path, 't5x')
    if has_safetensors(path):
        is_model = (path / 'config.json').exists()
        return Place(path, 'huggingface' if is_model else 'safetensors')
    return None


def _find_file(path: epath.Path) -> Place | None:
    """The checkpoint that a file is, by the beginning of its content."""
    if not path.exists():
        return None
    if has_safetensors(path):
        return Place(path, 'safetensors')
    with path.open('rb') as file:
        begins = file.read(1)
    # A map of msgpack, which has at most 15 keys: the whole checkpoint of an old T5X.
    return Place(path, 't5x') if begins and 0x80 <= begins[0] <= 0x8F else None


def _format_of_state(path: epath.Path) -> Format:
    """Who saved the item 'state', judging by the names of its arrays."""
    try:
        names = jax.tree.leaves(read_tree(path / 'state'))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        names = []
    if is_t5x(names):
        return 't5x'
    ours = 'step' in names and any(name.startswith('params/') for name in names)
    return 'meshwright' if ours or (path / 'run').is_dir() else 'orbax'


def list_steps(folder: epath.Path) -> list[FoundStep]:
    """The steps in the folder of a run, or of checkpoints, ascending, unfinished ones included."""
    found = list[FoundStep]()
    for directory, prefix in ((folder / 'checkpoints', ''), (folder, ''), (folder, 'checkpoint_')):
        steps, others = find_steps(directory, prefix)
        found += [examine(path, step) for step, path in steps.items()]
        for name in others:
            if match := re.fullmatch(rf'{prefix}(\d+){re.escape(TEMPORARY)}.*', name):
                path, reason = directory / name, f'{directory / name} was not saved completely'
                step = int(match[1])
                found.append(FoundStep(path=path, step=step, status='unfinished', reason=reason))
    if all(step.status == 'not a checkpoint' for step in found):
        return []
    return sorted(found, key=lambda step: (step.step, step.path.name))


def examine_place(place: Place) -> FoundStep:
    """The status of a checkpoint of any format, by the names and sizes of its files.

    A folder whose name is not a step may have any step. Raises a ConfigError if a newer version of
    this package wrote it.
    """
    step = place.step
    if step is None:
        try:
            manifest = read_manifest(place.path)
        except DamagedCheckpoint as error:
            return FoundStep(path=place.path, step=0, status='damaged', reason=str(error))
        step = manifest.step if manifest else 0
    found = examine(place.path, step)
    if found.status != 'not a checkpoint':
        return found
    reason = f'{place.path} has no manifest'
    return dataclasses.replace(found, status='without a manifest', reason=reason)


def choose_place(path: epath.Path, step: int | None = None) -> tuple[Place, list[str]]:
    """Chooses the checkpoint that a path names, and says which newer steps are not complete.

    `path` is a checkpoint, or a folder with several, of which the newest complete one is chosen by
    default. Raises a ConfigError if there is none.
    """
    if not path.exists():
        raise ConfigError(f'{path} does not exist')
    if place := find_place(path):
        if step not in (None, place.step):
            raise ConfigError(f'{path} is one checkpoint: remove --step={step}')
        return place, []
    steps, skipped = list_steps(path), list[str]()
    for found in reversed(steps):
        chosen = find_place(found.path) if step in (None, found.step) else None
        if chosen and (step is not None or found.status in ('good', 'without a manifest')):
            return chosen, skipped
        if step is None:
            skipped.append(f'{found.reason}: it is skipped')
    if not steps:
        raise ConfigError(f'{path} {_describe(path)}. Write the path of {UNDERSTOOD}')
    known = ', '.join(f'{found.step} ({found.status})' for found in steps)
    if step is not None:
        raise ConfigError(f'{path} has no readable step {step}: its steps are {known}')
    raise ConfigError(f'{path} has no complete step: its steps are {known}')


def _describe(path: epath.Path) -> str:
    """What is at a path that is not a checkpoint."""
    if not path.is_dir():
        return 'is a file, but neither safetensors nor a checkpoint of T5X'
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return 'is an empty folder'
    if path.name.endswith(TEMPORARY):
        return 'is a checkpoint that was not saved completely'
    shown = ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')
    return f'has no checkpoint, only {shown}'


# The files in which formats keep what they know about the arrays.
BOOKKEEPING = {
    '_CHECKPOINT_METADATA',
    'checkpoint',
    'commit_success.txt',
    'manifest.json',
    'model.safetensors.index.json',
    'step.json',
}


def other_content(place: Place) -> list[str]:
    """The files that a checkpoint has next to its arrays, and folders of them, sorted."""
    if not place.path.is_dir() or place.items == ('',):
        return []
    found = list[str]()
    for child in place.path.iterdir():
        if child.name in (*place.items, *BOOKKEEPING) or child.name.startswith('.'):
            continue
        if not child.is_dir():
            found += [] if child.suffix == '.safetensors' else [child.name]
            continue
        files = [file.name for file in child.iterdir()]
        if '.zarray' not in files:
            found += [f'{child.name}/{name}' for name in files if name not in BOOKKEEPING]
    return sorted(found)
