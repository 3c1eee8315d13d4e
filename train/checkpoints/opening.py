"""Opens the checkpoints of a run, or what it starts from: another run, or a folder of safetensors.

The functions dispatch on the type of the settings. Another format of checkpoints, such as T5X's,
registers implementations for its own settings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from etils import epath

from train.checkpoints.arrays.stored import StoredArray, in_memory
from train.checkpoints.config import AVERAGES, CheckpointConfig, RestoreConfig
from train.checkpoints.folder import Checkpoints
from train.checkpoints.formats.safetensors_files import has_safetensors, open_safetensors
from train.checkpoints.matching import Difference, Wanted
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps.finding import complete_steps, examine, find_steps, t5x_steps
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.errors import ConfigError
from train.paths import as_path

if TYPE_CHECKING:
    from train.checkpoints.local.tier import LocalTier

# The arrays of a state that are not taken, if a folder has them.
OTHERS = ('step', 'opt_state', AVERAGES)


def is_weights(path: epath.Path) -> bool:
    """Whether a path is a Hugging Face model, or another folder of safetensors."""
    return has_safetensors(path) or (path / 'config.json').exists()


class Weights(CheckpointReader):
    """A folder of safetensors, as a checkpoint of step 0 that has only parameters.

    With a `config.json`, it is a Hugging Face model, and its arrays get our names. Otherwise,
    they have them already. Floating-point arrays are converted to the dtype in which the run
    trains, because files often have bfloat16.
    """

    casts = True

    def __init__(self, folder: epath.Path, restore: RestoreConfig):
        self.directory, self._restore = folder, restore

    def path(self, step: int) -> epath.Path:
        """The folder, which has no steps."""
        return self.directory

    def newest_step(self, say: Callable[[str], None], below: int | None = None) -> int | None:
        return None if below is not None else 0

    def first_step(self, step: int) -> int:
        """A run that starts from weights has not done any steps."""
        return 0

    def origin(self, step: int) -> str:
        """What is restored, for messages."""
        return (
            f'{self.directory}, which has only parameters: the steps begin at 0, with a new '
            'optimizer state'
        )

    def arrays(self, step: int, wanted: Wanted) -> dict[str, StoredArray]:
        """Opens the parameters under our names. An array that a run does not have keeps its own."""
        arrays = {'step': in_memory(np.int32(0))}
        from train.checkpoints.huggingface.folders import open_parameters  # imports our models

        if not (self.directory / 'config.json').exists():
            stored = open_safetensors(self.directory)
            return arrays | {n: x for n, x in stored.items() if not n.startswith(OTHERS)}
        return arrays | open_parameters(self.directory, wanted)

    def _match(
        self, step: int, by_name: Wanted, parts: tuple[str, ...], *, can_initialize: bool
    ) -> tuple[dict[str, StoredArray], list[Difference]]:
        """Finds the stored array of each parameter. The optimizer state is always new."""
        variables = {n: array for n, array in by_name.items() if n.startswith(self.variables)}
        return super()._match(step, variables, ('',), can_initialize=can_initialize)

    def close(self) -> None:
        """Does nothing: files are opened for each read."""


@functools.singledispatch
def open_checkpoints(config: CheckpointConfig, model_dir: epath.Path) -> Checkpoints:
    """Opens the checkpoints in the folder of a run, which may have none yet.

    Raises a ConfigError if the folder of the run contains checkpoints of T5X.
    """
    if steps := t5x_steps(model_dir):
        raise ConfigError(
            f'MODEL_DIR {model_dir} contains checkpoints of T5X, up to checkpoint_{steps[-1]}: '
            'this run cannot continue them. Use another MODEL_DIR, or resume them with a gin '
            'file of T5X (train.t5x)'
        )
    return Checkpoints(model_dir / 'checkpoints', config)


def open_local(
    config: CheckpointConfig, model_dir: epath.Path, say: Callable[[str], None]
) -> LocalTier | None:
    """Opens the local checkpoints of a run, if the settings ask for any; see `LocalTier`."""
    if config.local_dir is None:
        return None
    from train.checkpoints.local.tier import LocalTier  # Most runs have none.

    return LocalTier(config, model_dir, say)


@functools.singledispatch
def find_checkpoint(
    restore: RestoreConfig, say: Callable[[str], None] = lambda line: None
) -> tuple[epath.Path, int]:
    """Finds the checkpoint that a run starts from: its folder of checkpoints, and its step.

    It only reads files, and does not wait for other processes. `say` prints one line for each
    folder that mode 'latest' skips. Raises a DamagedCheckpoint if the checkpoint that mode
    'specific' names is damaged, and a ConfigError if there is none, or it is incomplete.
    """
    path = as_path(restore.setting, restore.path)
    if is_weights(path):
        return path, 0
    folder = path.parent if restore.mode == 'specific' else path
    if restore.mode == 'latest' and (path / 'checkpoints').is_dir():
        folder = path / 'checkpoints'
    t5x_name = re.fullmatch(r'checkpoint_(\d+)', path.name)
    if t5x_name or t5x_steps(path):
        run, step = (path.parent, t5x_name[1]) if t5x_name else (path, '<step>')
        raise ConfigError(
            f'{restore.setting} {path} is a checkpoint of T5X: restore it with '
            'train.t5x.checkpoint_configs.RestoreCheckpointConfig(path=...).translated(). '
            f'A checkpoint of this trainer is {run / "checkpoints" / step}'
        )
    if not path.is_dir():
        raise ConfigError(f'{restore.setting} {path} does not exist')
    if restore.mode == 'specific' and not path.name.isdecimal():
        raise ConfigError(
            f'{restore.setting} {path} is not a checkpoint directory (expected '
            ".../checkpoints/<step>): add the step, or use mode 'latest'"
        )
    step = _find_step(restore, path, folder, say)
    if step is None:
        found = ', '.join(map(str, complete_steps(folder))) or 'none'
        raise ConfigError(
            f'{restore.setting} {path} is not a complete checkpoint; complete steps in {folder}: '
            f'{found}'
        )
    return folder, step


def _find_step(
    restore: RestoreConfig, path: epath.Path, folder: epath.Path, say: Callable[[str], None]
) -> int | None:
    """Returns the step to restore, which may lack a manifest, or None if there is no such step."""
    paths = {int(path.name): path} if restore.mode == 'specific' else find_steps(folder)[0]
    for step, candidate in reversed(paths.items()):
        found = examine(candidate, step, contents=True)
        if found.status in ('good', 'without a manifest'):
            return step
        if restore.mode == 'specific' and found.status == 'damaged':
            raise DamagedCheckpoint(f'{restore.setting}: {found.reason}: restore another one')
        say(f'{found.reason}: looking for an older one')
    return None


@functools.singledispatch
def open_restored(restore: RestoreConfig, folder: epath.Path) -> CheckpointReader:
    """Opens the folder that `find_checkpoint` returned."""
    if is_weights(folder):
        return Weights(folder, restore)
    return Checkpoints(folder, CheckpointConfig(keep=None), restore)
