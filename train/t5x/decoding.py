"""T5X's decoding functions, so that gin files can name them. They are never called.

No task here computes metrics from decoded text. To show a text at the end of a run, use
the evaluator `train.Samples`.
"""

from __future__ import annotations


def temperature_sample(temperature: float = 1.0, topk: int = 1, topp: float = 0.0) -> None:
    """Stands for sampling from the softmax."""


def beam_search(alpha: float = 0.6) -> None:
    """Stands for beam search."""
