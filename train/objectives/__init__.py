"""What a run minimizes: objectives, and the models that they train."""

from train.objectives.model import LinenModel, Model, as_model
from train.objectives.next_token import NextToken
from train.objectives.objective import Loss, Objective, compute_loss, row_weights
from train.objectives.supervised import Supervised

__all__ = [
    'LinenModel',
    'Loss',
    'Model',
    'NextToken',
    'Objective',
    'Supervised',
    'as_model',
    'compute_loss',
    'row_weights',
]
