"""T5X's `contrib.gpu.t5.network`: the network of `examples.t5`, with scaled attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from train.models import t5
from train.t5x import network
from train.t5x.network import fixed


@dataclasses.dataclass(frozen=True)
class T5Config(t5.T5Config):
    """The sizes and choices of the network; see `train.models.t5.T5Config`."""

    remat_policy: t5.RematPolicy = fixed('none')
    scan_layers: bool = fixed()
    param_scan_axis: int = fixed(1)
    scalable: bool = fixed()
    experts: Any = fixed(None)


class Transformer(network.Transformer):
    """The network.

    Attributes:
      config: its sizes and choices.
    """
