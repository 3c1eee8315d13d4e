"""T5X's `contrib.moe.checkpoints`: experts that start from the weights of a dense model."""

from __future__ import annotations

import dataclasses

from train.errors import check_counts
from train.t5x.checkpoints import Checkpointer


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleCheckpointer(Checkpointer):
    """Restores a dense checkpoint into a model with experts, as a `checkpointer_cls`.

    Every expert starts with a copy of the dense layer. Arrays of experts have 'expert/' in their
    names, and `assignment_map` says which array of the checkpoint they start from.

    Attributes:
      num_experts: the number of experts of each layer.
    """

    num_experts: int

    def __post_init__(self) -> None:
        check_counts(**{'checkpoints.UpcycleCheckpointer.num_experts': self.num_experts})
