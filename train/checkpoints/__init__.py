"""Checkpoints by Orbax: saved without a mesh, restored onto any mesh."""

from train.checkpoints.config import (
    CheckpointConfig,
    RestoreConfig,
    RestoreMode,
    check_renames,
    complete_steps,
)
from train.checkpoints.folder import Checkpoints

__all__ = [
    'CheckpointConfig',
    'Checkpoints',
    'RestoreConfig',
    'RestoreMode',
    'check_renames',
    'complete_steps',
]
