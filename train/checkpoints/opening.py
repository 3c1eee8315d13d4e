"""Opens the checkpoints of a run, or of another run that it starts from, as its settings say.

The functions dispatch on the type of the settings. Another format of checkpoints, such as T5X's,
registers implementations for its own settings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from etils import epath

from train.checkpoints.config import CheckpointConfig, RestoreConfig
from train.checkpoints.folder import Checkpoints
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps.finding import complete_steps, examine, find_steps, t5x_steps
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.errors import ConfigError
from train.paths import as_path


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


@functools.singledispatch
def find_checkpoint(
    restore: RestoreConfig, say: Callable[[str], None] = lambda line: None
) -> tuple[epath.Path, int]:
    """Finds the checkpoint that a run starts from.

    It only reads files, and does not wait for other processes. Returns the folder of checkpoints,
    and the step to restore. Raises a DamagedCheckpoint if the checkpoint that mode 'specific' names
    is damaged, and a ConfigError if there is no such checkpoint, or it is incomplete.

    Args:
      restore: the settings that name it.
      say: prints one line for each folder that mode 'latest' skips.
    """
    from train.checkpoints.weights import is_weights

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
    from train.checkpoints.weights import Weights, is_weights  # imports our models

    if is_weights(folder):
        return Weights(folder, restore)
    return Checkpoints(folder, CheckpointConfig(keep=None), restore)
