"""The output layer of token models with its loss: from hidden states to the scores of targets.

`logits` is what a model hands over, and what a loss gets of it; `fused` scores targets from either,
with gradients; `chunks` is its mathematics on one device; `placement` the mesh axes that it uses.
"""

from train.output_layer.fused import score_targets
from train.output_layer.logits import DeferredLogits, OutputSettings, TargetScores

__all__ = ['DeferredLogits', 'OutputSettings', 'TargetScores', 'score_targets']
