"""T5X's `examples.decoder_only.network`: a decoder with relative biases, and a prefix."""

from __future__ import annotations

import dataclasses

from train.models import t5
from train.t5x.refusals import expect


@dataclasses.dataclass(frozen=True)
class TransformerConfig(t5.DecoderOnlyConfig):
    """The sizes and choices of the network; see `train.models.t5.DecoderOnlyConfig`."""


class DecoderWrapper(t5.DecoderOnly):
    """The network.

    Attributes:
      config: its sizes and choices.
    """

    def __post_init__(self) -> None:
        key, written = 'network.DecoderWrapper.config', '@network.TransformerConfig()'
        expect(key, self.config, t5.DecoderOnlyConfig, written)
        super().__post_init__()
