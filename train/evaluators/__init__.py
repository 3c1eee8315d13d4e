"""Evaluators: scores of a state on held-out rows, samples of text, and whatever users add."""

from train.evaluators.decoded import DecodedText
from train.evaluators.evaluator import Evaluator, is_due, prepare_evaluators, run_evaluators
from train.evaluators.held_out import HeldOut
from train.evaluators.predictions import PredictionFiles
from train.evaluators.samples import Samples

__all__ = [
    'DecodedText',
    'Evaluator',
    'HeldOut',
    'PredictionFiles',
    'Samples',
    'is_due',
    'prepare_evaluators',
    'run_evaluators',
]
