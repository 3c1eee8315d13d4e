"""The output layer of token models with its loss: from hidden states to the scores of targets.

`deferred` is what a model hands over instead of logits; `scoring` scores targets from either,
`scores` from logits, and `fused` from hidden states, with gradients; `chunks` is its mathematics on
one device; `placement` the mesh axes that it uses; `settings` what users choose.
"""

from train.output_layer.deferred import DeferredLogits
from train.output_layer.scores import TargetScores
from train.output_layer.scoring import score_targets
from train.output_layer.settings import OutputSettings

__all__ = ['DeferredLogits', 'OutputSettings', 'TargetScores', 'score_targets']
