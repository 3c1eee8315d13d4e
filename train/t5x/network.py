"""T5X's `examples.t5.network`: the network of T5 1.0 and 1.1, mT5 and ByT5."""

from __future__ import annotations

import dataclasses

from train.models import t5
from train.t5x.refusals import expect


@dataclasses.dataclass(frozen=True)
class SeparateLayersConfig(t5.T5Config):
    """The sizes and choices of a network that does not scan its layers."""

    remat_policy: t5.RematPolicy = dataclasses.field(default='none', init=False, repr=False)
    scan_layers: bool = dataclasses.field(default=False, init=False, repr=False)
    param_scan_axis: int = dataclasses.field(default=1, init=False, repr=False)
    scalable: bool = dataclasses.field(default=False, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class T5Config(SeparateLayersConfig):
    """The sizes and choices of the network; see `train.models.t5.T5Config`."""

    scale_attn_logits: bool = dataclasses.field(default=False, init=False, repr=False)


class Transformer(t5.T5):
    """The network.

    Attributes:
      config: its sizes and choices.
    """

    def __post_init__(self) -> None:
        key, written = 'network.Transformer.config', '@network.T5Config()'
        expect(key, self.config, t5.T5Config, written)
        super().__post_init__()
