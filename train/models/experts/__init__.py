"""Mixtures of experts: routing as pure functions, and a layer that replaces an MLP."""

from train.models.experts.config import ExpertsConfig as ExpertsConfig
from train.models.experts.layer import ExpertMlp as ExpertMlp
