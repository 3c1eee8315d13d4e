"""T5X's `examples.scalable_t5.network`: T5 with scanned layers, also for umT5."""

from __future__ import annotations

import dataclasses

from train.models import t5
from train.t5x import network


@dataclasses.dataclass(frozen=True)
class T5Config(t5.T5Config):
    """The sizes and choices of the network; see `train.models.t5.T5Config`."""

    float32_attention_logits: bool = dataclasses.field(default=False, init=False, repr=False)
    scale_attn_logits: bool = dataclasses.field(default=False, init=False, repr=False)
    scan_layers: bool = True
    scalable: bool = dataclasses.field(default=True, init=False, repr=False)


class Transformer(network.Transformer):
    """The network.

    Attributes:
      config: its sizes and choices.
    """
