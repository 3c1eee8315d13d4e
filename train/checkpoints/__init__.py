"""Checkpoints by Orbax: saved without a mesh, restored onto any mesh."""

from train.checkpoints.config import (
    CheckpointConfig as CheckpointConfig,
    RestoreConfig as RestoreConfig,
    RestoreMode as RestoreMode,
    check_renames as check_renames,
)
from train.checkpoints.folder import Checkpoints as Checkpoints, FailedSave as FailedSave
from train.checkpoints.opening import (
    find_checkpoint as find_checkpoint,
    open_checkpoints as open_checkpoints,
    open_local as open_local,
    open_restored as open_restored,
)
from train.checkpoints.steps.finding import complete_steps as complete_steps
from train.checkpoints.steps.manifest import DamagedCheckpoint as DamagedCheckpoint
from train.checkpoints.steps.record import StepRecord as StepRecord
