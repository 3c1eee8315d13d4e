"""T5X's `contrib.gpu.t5.network`: the network of `examples.t5`, with scaled attention."""

from __future__ import annotations

import dataclasses

from train.t5x import network


@dataclasses.dataclass(frozen=True)
class T5Config(network.SeparateLayersConfig):
    """The sizes and choices of the network; see `train.models.t5.T5Config`."""


class Transformer(network.Transformer):
    """The network.

    Attributes:
      config: its sizes and choices.
    """
