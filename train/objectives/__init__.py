"""Objectives, which define the loss that a run minimizes, and the models that they train."""

from train.objectives.modules import LinenModel as LinenModel, as_model as as_model
from train.objectives.objective import (
    Loss as Loss,
    Model as Model,
    Objective as Objective,
    Ratio as Ratio,
    compute_loss as compute_loss,
    row_weights as row_weights,
)
from train.objectives.supervised import Supervised as Supervised
from train.objectives.token_loss import (
    EncoderDecoder as EncoderDecoder,
    NextToken as NextToken,
    PrefixLanguageModel as PrefixLanguageModel,
    TokenLoss as TokenLoss,
)
