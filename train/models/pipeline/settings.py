"""The settings of a pipeline."""

from __future__ import annotations

import dataclasses

from train.errors import ConfigError, check_counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Runs scanned layers in stages, over the mesh axis that the rules give to 'layers'.

    A stage runs on the devices of one index of this axis and holds the parameters of its layers.
    The batch is divided into microbatches, which pass from stage to stage. Out of
    num_microbatches * repeats + stages - 1 steps of a stage, stages - 1 are idle.

    Attributes:
      num_microbatches: the number of microbatches, a multiple of the number of stages.
      repeats: how often a microbatch passes through all stages. The layers are divided into
        stages * repeats groups, and group n belongs to stage n % stages. More repeats leave stages
        idle for a smaller part of the time, and send activations and parameters more often. They
        need `remat`.
      recompute_stages: whether the backward pass first recomputes a stage from its input. A device
        then keeps one activation per microbatch instead of one per microbatch and layer, and
        computes the forward pass once more.
    """

    num_microbatches: int
    repeats: int = 1
    recompute_stages: bool = False

    def __post_init__(self) -> None:
        check_counts(
            **{
                'Pipeline.num_microbatches': self.num_microbatches,
                'Pipeline.repeats': self.repeats,
            }
        )
        if not isinstance(self.recompute_stages, bool):
            raise ConfigError(
                f'Pipeline.recompute_stages is {self.recompute_stages!r}: use True or False'
            )
