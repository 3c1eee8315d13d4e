"""T5X's `examples.t5.network`: the network of T5 1.0 and 1.1, mT5 and ByT5."""

from __future__ import annotations

import dataclasses
from typing import Any

from train.models import t5
from train.t5x.refusals import expect


def fixed(value: Any = False) -> Any:
    """A field that one of T5X's networks does not have as a setting."""
    return dataclasses.field(default=value, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class T5Config(t5.T5Config):
    """The sizes and choices of the network; see `train.models.t5.T5Config`."""

    scale_attn_logits: bool = fixed()
    remat_policy: t5.RematPolicy = fixed('none')
    scan_layers: bool = fixed()
    param_scan_axis: int = fixed(1)
    scalable: bool = fixed()
    experts: Any = fixed(None)


class Transformer(t5.T5):
    """The network.

    Attributes:
      config: its sizes and choices.
    """

    def __post_init__(self) -> None:
        key, written = 'network.Transformer.config', '@network.T5Config()'
        expect(key, self.config, t5.T5Config, written)
        super().__post_init__()
