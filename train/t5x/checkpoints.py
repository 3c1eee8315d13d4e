"""T5X's `checkpoints`: folders of checkpoints that T5X wrote, or can read.

Checkpoints of both formats are restored onto any mesh. New ones, `<model_dir>/checkpoint_<step>`,
are written in the format that T5X writes by default, through Orbax, or in its older one. Their
arrays have T5X's names, so T5X can resume a run from here, and the other way round.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
from etils import epath
from flax import traverse_util

from partitioning.state.boxes import key_names
from train import checkpoints
from train.checkpoints import complete_steps
from train.checkpoints.arrays.stored import StoredArray, repeat_first
from train.checkpoints.config import WhenBusy
from train.checkpoints.formats.t5x_files import STEP, name_in_t5x, read_arrays
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps import manifest
from train.checkpoints.steps.finding import saved_steps, t5x_format, t5x_steps, usable_t5x_steps
from train.errors import ConfigError, check_counts, first_line
from train.optimizers.factored import AdafactorState
from train.paths import as_path, is_remote
from train.t5x.state_utils import transform

STEP_FOLDER = r'checkpoint_(\d+)'
# The beginnings of the names of what an evaluation needs.
VARIABLES = (STEP, 'target', 'flax_mutables')


def names_of(state: Any) -> list[str]:
    """T5X's names of the arrays of a TrainState, in the order of its leaves; see `name_in_t5x`."""

    def is_adafactor(x: Any) -> bool:
        return isinstance(x, AdafactorState)

    optimizer = jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=is_adafactor)
    adafactors = [
        '/'.join(('opt_state', *key_names(path))) for path, x in optimizer if is_adafactor(x)
    ]
    names = ('/'.join(key_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(state))
    return [name_in_t5x(name, adafactors) for name in names]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """T5X's name for reading and writing checkpoints. It has no settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleCheckpointer(Checkpointer):
    """Restores a dense checkpoint into a model with experts, as a `checkpointer_cls`.

    Every expert starts with a copy of the dense layer. Arrays of experts have 'expert/' in their
    names, and `assignment_map` says which array of the checkpoint they start from.

    Attributes:
      num_experts: the number of experts of each layer.
    """

    num_experts: int

    def __post_init__(self) -> None:
        check_counts(**{'checkpoints.UpcycleCheckpointer.num_experts': self.num_experts})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointManager:
    """T5X's name for the manager of a folder of checkpoints. It has no settings."""


class T5XCheckpoints(checkpoints.Checkpoints):
    """The checkpoints of one run, in `<directory>/checkpoint_<step>`, with T5X's names.

    T5X ignores the manifest and the record in them. Its own have neither, and are accepted.

    Args:
      config: when to save, and which checkpoints to keep. Only checkpoints of this trainer count.
      restore: the settings that name `directory`, if it belongs to another run.
    """

    variables = VARIABLES
    prefix = 'checkpoint_'
    needs_manifest = False
    use_ocdbt = True
    # The folder 'dataset' of T5X is empty here, because the step determines the next row.
    items = ('dataset', *checkpoints.Checkpoints.items)
    parameters = 'target/'
    casts = True

    def __init__(
        self,
        directory: epath.Path,
        config: checkpoints.CheckpointConfig,
        restore: T5XRestore | None = None,
    ):
        super().__init__(directory, config, restore)
        self._t5x = restore

    def path(self, step: int) -> epath.Path:
        """The folder of the checkpoint of a step, or the file of an old one."""
        named = self._t5x.named if self._t5x else None
        return named or super().path(step)

    def _complete_steps(self) -> list[int]:
        """The steps of complete checkpoints of either format, and of either system."""
        return usable_t5x_steps(self.directory)

    def names(self, abstract_state: Any) -> list[str]:
        """T5X's names of the arrays of a state."""
        return names_of(abstract_state)

    def arrays(self, step: int, wanted: Any) -> dict[str, StoredArray]:
        """Opens the arrays of a checkpoint, and applies the transformations of the settings."""
        arrays = read_arrays(self.path(step))
        return transform(self._t5x.transformations, arrays, wanted) if self._t5x else arrays

    def adapt(self, array: StoredArray, wanted: jax.ShapeDtypeStruct, name: str) -> StoredArray:
        """The array of an expert is repeated for each of them if the checkpoint is dense."""
        num_experts = self._t5x.num_experts if self._t5x else None
        sparse = num_experts is not None and 'expert/' in name
        if sparse and wanted.shape[:1] == (num_experts,) and wanted.shape[1:] == array.shape:
            return repeat_first(array, wanted.shape[0])
        return array

    def first_step(self, step: int) -> int:
        """The step that a run starts with: 0 if the settings do not restore the step."""
        if self._t5x is None or not self._t5x.renames:
            return step
        return 0 if self._t5x.drops(STEP) else step

    def _open_writer(self) -> Any:
        if getattr(self._config, 'use_orbax', True):
            return super()._open_writer()
        from train.checkpoints.formats.t5x_writer import LegacyWriter

        return LegacyWriter(self.directory, self.prefix)

    def check_writable(self) -> None:
        super().check_writable()
        if not getattr(self._config, 'use_orbax', True):
            from train.checkpoints.formats.t5x_writer import check_can_write

            check_can_write(self.directory)

    def restarts_data(self, step: int) -> bool:
        """As T5X does, unless it has saved where its data was. Our own runs go on."""
        if self._t5x is not None:
            return self._t5x.restart_data
        saves = getattr(self._config, 'save_dataset', False)
        return not saves and not (self.path(step) / manifest.FILE).exists()

    def tree(self, state: Any) -> Any:
        """The arrays of a state in the nested dict that T5X would save."""
        named = dict(zip(self.names(state), jax.tree.leaves(state), strict=True))
        return traverse_util.unflatten_dict(named, sep='/')


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5XCheckpointConfig(checkpoints.CheckpointConfig):
    """When to save checkpoints in T5X's format. As in T5X, a save waits for an earlier one.

    Attributes:
      save_dataset: whether a run that resumes from a checkpoint that T5X itself has written
        continues with the next row. Otherwise, it begins with the first one, as T5X does.
      use_orbax: whether steps are written through Orbax, or otherwise in T5X's older format.
    """

    save_dataset: bool = False
    use_orbax: bool = True
    when_busy: WhenBusy = 'wait'

    def restore_of(self, model_dir: epath.Path, step: int) -> checkpoints.RestoreConfig:
        """The settings that restore one of the checkpoints of a run."""
        if saved_steps(model_dir / 'checkpoints'):
            return super().restore_of(model_dir, step)
        return T5XRestore(path=str(model_dir / f'checkpoint_{step}'), mode='specific')


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5XRestore(checkpoints.RestoreConfig):
    """The checkpoint of T5X, or of this trainer, that a run starts from.

    Attributes:
      transformations: functions that rename arrays of the checkpoint; see `train.t5x.state_utils`.
      num_experts: the number of experts that each get the arrays of a dense checkpoint, or None.
    """

    transformations: Sequence[Callable[..., Any]] = ()
    num_experts: int | None = None
    setting: ClassVar[str] = 'utils.RestoreCheckpointConfig.path'
    renames_setting: ClassVar[str] = 'utils.RestoreCheckpointConfig.assignment_map'
    initialize_setting: ClassVar[str] = 'utils.RestoreCheckpointConfig.fallback_to_scratch'
    dtype_setting: ClassVar[str] = 'utils.RestoreCheckpointConfig.dtype'

    @property
    def named(self) -> epath.Path | None:
        """The one checkpoint that `path` names, or None if it names a folder of them."""
        path = as_path(self.setting, self.path)
        is_one = self.mode == 'specific' or re.fullmatch(STEP_FOLDER, path.name)
        return path if is_one and t5x_format(path) else None

    @property
    def is_one(self) -> bool:
        return super().is_one or self.named is not None

    def all(self) -> list[T5XRestore]:
        """All checkpoints in the folder `path`, in the order of their steps, or the one there.

        Raises a ConfigError if there are none.
        """
        if self.named:
            return [dataclasses.replace(self, mode='specific')]
        folder, _ = find_t5x_checkpoint(self)
        t5x = [f'checkpoint_{step}' for step in usable_t5x_steps(folder)]
        names = t5x or [str(step) for step in complete_steps(folder)]
        paths = [str(folder / name) for name in names]
        return [dataclasses.replace(self, path=path, mode='specific') for path in paths]


# What settings of this trainer's own format do.
_find_own = checkpoints.find_checkpoint.dispatch(checkpoints.RestoreConfig)
_open_own = checkpoints.open_restored.dispatch(checkpoints.RestoreConfig)


@checkpoints.open_checkpoints.register
def open_t5x_checkpoints(
    config: T5XCheckpointConfig, model_dir: epath.Path
) -> checkpoints.Checkpoints:
    """Opens the checkpoints of a run, which T5X or this trainer has begun.

    Raises a ConfigError if the folder has checkpoints of T5X and of this trainer.
    """
    own, t5x = saved_steps(model_dir / 'checkpoints'), t5x_steps(model_dir)
    if own and t5x:
        raise ConfigError(
            f'MODEL_DIR {model_dir} contains checkpoints of T5X, up to checkpoint_{t5x[-1]}, '
            f"and of this trainer's own format, up to checkpoints/{own[-1]}: move one of them "
            'away'
        )
    if own:
        return checkpoints.Checkpoints(model_dir / 'checkpoints', config)
    return T5XCheckpoints(model_dir, config)


@checkpoints.find_checkpoint.register
def find_t5x_checkpoint(
    restore: T5XRestore, say: Callable[[str], None] = lambda line: None
) -> tuple[epath.Path, int]:
    """Finds the checkpoint; see `find_checkpoint`."""
    path = as_path(restore.setting, restore.path)
    try:
        return _find(restore, path, say)
    except ConfigError:
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        raise ConfigError(
            f'{restore.setting} {path} cannot be read ({first_line(error)}): copy the checkpoint '
            'to this machine, or check the permissions and the network'
        ) from error


def _find(
    restore: T5XRestore, path: epath.Path, say: Callable[[str], None]
) -> tuple[epath.Path, int]:
    if (path.parent / f'{path.name}.index').exists():
        raise ConfigError(
            f'{restore.setting} {path} is a checkpoint of TensorFlow: convert it with T5X'
        )
    if restore.named:
        if restore.mode == 'latest':
            say(
                f'{restore.setting} {path} is itself a checkpoint, which is restored: write '
                f"mode = 'specific', or {str(path.parent)!r} for the newest one there"
            )
        if name := re.fullmatch(STEP_FOLDER, path.name):
            return path.parent, int(name[1])
        step = read_arrays(path).get(STEP)
        if step is None:
            raise ConfigError(f'{restore.setting} {path} has no array {STEP}')
        return path.parent, int(step.read().reshape(()))
    if re.fullmatch(STEP_FOLDER, path.name):
        found = ', '.join(map(str, t5x_steps(path.parent))) or 'none'
        raise ConfigError(
            f'{restore.setting} {path} is not a complete checkpoint; complete steps in '
            f'{path.parent}: {found}'
        )
    steps = usable_t5x_steps(path) if restore.mode == 'latest' else []
    if steps and saved_steps(path / 'checkpoints'):
        raise ConfigError(
            f'{restore.setting} {path} contains checkpoints of T5X, up to checkpoint_{steps[-1]}, '
            "and of this trainer: write the path of one of them, and mode = 'specific'"
        )
    return (path, steps[-1]) if steps else _find_own(restore, say)


@checkpoints.open_restored.register
def open_t5x_restored(restore: T5XRestore, folder: epath.Path) -> CheckpointReader:
    """Opens the folder that `find_t5x_checkpoint` returned."""
    config = checkpoints.CheckpointConfig(keep=None)
    if restore.named or t5x_steps(folder):
        return T5XCheckpoints(folder, config, restore)
    return _open_own(restore, folder)
