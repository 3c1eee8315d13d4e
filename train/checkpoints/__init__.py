"""Saves checkpoints in the format of Orbax, and restores them onto any mesh."""

from train.checkpoints.config import CheckpointConfig, RestoreConfig, RestoreMode, check_renames
from train.checkpoints.folder import Checkpoints, FailedSave
from train.checkpoints.opening import find_checkpoint, open_checkpoints, open_restored
from train.checkpoints.steps.finding import complete_steps
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.checkpoints.steps.record import StepRecord

__all__ = [
    'CheckpointConfig',
    'Checkpoints',
    'DamagedCheckpoint',
    'FailedSave',
    'RestoreConfig',
    'RestoreMode',
    'StepRecord',
    'check_renames',
    'complete_steps',
    'find_checkpoint',
    'open_checkpoints',
    'open_restored',
]
