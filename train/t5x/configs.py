"""T5X's `utils`: the settings of datasets and checkpoints, and learning rate schedules."""

from train.t5x.checkpoint_configs import (
    CheckpointConfig,
    RestoreCheckpointConfig,
    SaveCheckpointConfig,
)
from train.t5x.datasets import DatasetConfig
from train.t5x.run_functions import (
    TrainStateInitializer,
    get_dataset,
    get_training_eval_datasets,
    prepare_train_iter,
    verify_matching_vocabs,
)
from train.t5x.schedules import create_learning_rate_scheduler

__all__ = [
    'CheckpointConfig',
    'DatasetConfig',
    'RestoreCheckpointConfig',
    'SaveCheckpointConfig',
    'TrainStateInitializer',
    'create_learning_rate_scheduler',
    'get_dataset',
    'get_training_eval_datasets',
    'prepare_train_iter',
    'verify_matching_vocabs',
]
