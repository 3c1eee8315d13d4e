"""A layer with a mixture of experts in place of an MLP, and its routing as pure functions."""

from train.models.experts.config import ExpertsConfig as ExpertsConfig
from train.models.experts.layer import ExpertMlp as ExpertMlp
