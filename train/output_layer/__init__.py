"""Computes the output layer of token models and its loss, in chunks of the vocabulary.

`logits` defines the value that a model returns and a loss reads. `fused` scores targets from logits
or hidden states, with gradients, and `chunks` does so on one device. `placement` finds the mesh
axes.
"""

from train.output_layer.fused import score_targets as score_targets
from train.output_layer.logits import (
    DeferredLogits as DeferredLogits,
    OutputSettings as OutputSettings,
    TargetScores as TargetScores,
)
