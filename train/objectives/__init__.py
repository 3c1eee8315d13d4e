"""What a run minimizes: objectives, and the models that they train."""

from train.objectives.model import Model
from train.objectives.modules import LinenModel, as_model
from train.objectives.objective import Loss, Objective, compute_loss, row_weights
from train.objectives.sequences import EncoderDecoder, NextToken, PrefixLanguageModel
from train.objectives.supervised import Supervised
from train.objectives.token_loss import TokenLoss

__all__ = [
    'EncoderDecoder',
    'LinenModel',
    'Loss',
    'Model',
    'NextToken',
    'Objective',
    'PrefixLanguageModel',
    'Supervised',
    'TokenLoss',
    'as_model',
    'compute_loss',
    'row_weights',
]
