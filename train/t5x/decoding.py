"""T5X's decoding functions, by name: no task here has metrics of decoded text, so none is called.

The text that a run shows at its end is set by `SampleConfig` of `train.sampling`.
"""

from __future__ import annotations


def temperature_sample(temperature: float = 1.0, topk: int = 1, topp: float = 0.0) -> None:
    """Sampling from the softmax."""


def beam_search(alpha: float = 0.6) -> None:
    """Beam search."""
