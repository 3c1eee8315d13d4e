"""Checkpoints by Orbax: saved without a mesh, restored onto any mesh."""

from train.checkpoints.config import CheckpointConfig
from train.checkpoints.folder import Checkpoints
from train.checkpoints.restore import RestoreConfig, RestoreMode, check_renames
from train.checkpoints.steps import complete_steps

__all__ = [
    'CheckpointConfig',
    'Checkpoints',
    'RestoreConfig',
    'RestoreMode',
    'check_renames',
    'complete_steps',
]
