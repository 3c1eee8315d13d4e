"""T5X's `contrib.gpu.t5.network`: the network of `examples.t5`, with scaled attention."""

from __future__ import annotations

import dataclasses

from train.models import t5
from train.t5x import network


@dataclasses.dataclass(frozen=True)
class T5Config(t5.T5Config):
    """The sizes and choices of the network; see `train.models.t5.T5Config`."""

    remat_policy: t5.RematPolicy = dataclasses.field(default='none', init=False, repr=False)
    scan_layers: bool = dataclasses.field(default=False, init=False, repr=False)
    param_scan_axis: int = dataclasses.field(default=1, init=False, repr=False)
    scalable: bool = dataclasses.field(default=False, init=False, repr=False)


class Transformer(network.Transformer):
    """The network.

    Attributes:
      config: its sizes and choices.
    """
