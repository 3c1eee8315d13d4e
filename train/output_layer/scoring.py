"""Scores of targets from whatever a model returns: logits, or the hidden states before them."""

from __future__ import annotations

import jax

from train.errors import ConfigError
from train.output_layer.deferred import DeferredLogits
from train.output_layer.fused import score_deferred
from train.output_layer.scores import TargetScores, score_logits
from train.output_layer.settings import OutputSettings


def score_targets(
    outputs: jax.Array | DeferredLogits, targets_BL: jax.Array, settings: OutputSettings
) -> TargetScores:
    """Scores targets, without whole logits if the model has deferred them.

    Args:
      outputs: the logits, [batch, length, vocab], or what computes them.
      targets_BL: int targets, [batch, length].
      settings: how deferred logits are computed.

    Raises:
      ConfigError: if the logits are not deferred, and the settings are not the defaults.
    """
    if isinstance(outputs, DeferredLogits):
        return score_deferred(outputs, targets_BL, settings)
    if settings != OutputSettings():
        raise ConfigError(
            f'{settings} needs a model that hands over its hidden states, but this one returns '
            'logits: remove the settings, or give its __call__ an argument defer_logits with which '
            'it returns train.output_layer.DeferredLogits'
        )
    return score_logits(outputs, targets_BL)
