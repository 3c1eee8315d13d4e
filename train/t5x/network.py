"""The networks of T5X's examples, each under the name that `train.t5x.modules` translates to.

T5X has one module for each of them, in which the classes share their names. A gin file sets the
parameters of each class alone, so each has a class here, too.
"""

from __future__ import annotations

import dataclasses

from train.models import t5
from train.t5x.refusals import expect


@dataclasses.dataclass(frozen=True)
class ScalableT5Config(t5.T5Config):
    """`examples.scalable_t5`: T5 with scanned layers, also for umT5; see `t5.T5Config`."""

    float32_attention_logits: bool = dataclasses.field(default=False, init=False, repr=False)
    scale_attn_logits: bool = dataclasses.field(default=False, init=False, repr=False)
    scan_layers: bool = True
    scalable: bool = dataclasses.field(default=True, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class GpuT5Config(t5.T5Config):
    """`contrib.gpu.t5`: separate layers, and attention that may be scaled; see `t5.T5Config`."""

    remat_policy: t5.RematPolicy = dataclasses.field(default='none', init=False, repr=False)
    scan_layers: bool = dataclasses.field(default=False, init=False, repr=False)
    param_scan_axis: int = dataclasses.field(default=1, init=False, repr=False)
    scalable: bool = dataclasses.field(default=False, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class T5Config(GpuT5Config):
    """`examples.t5`: T5 1.0 and 1.1, mT5 and ByT5, with separate layers; see `t5.T5Config`."""

    scale_attn_logits: bool = dataclasses.field(default=False, init=False, repr=False)


class Transformer(t5.T5):
    """The network of `examples.t5`.

    Attributes:
      config: its sizes and choices.
    """

    def __post_init__(self) -> None:
        expect('network.Transformer.config', self.config, t5.T5Config, '@network.T5Config()')
        super().__post_init__()


class GpuTransformer(Transformer):
    """The network of `contrib.gpu.t5`; see `Transformer`."""


class ScalableTransformer(Transformer):
    """The network of `examples.scalable_t5`; see `Transformer`."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig(t5.DecoderOnlyConfig):
    """`examples.decoder_only`: the sizes and choices; see `t5.DecoderOnlyConfig`."""


class DecoderWrapper(t5.DecoderOnly):
    """The network of `examples.decoder_only`: a decoder with relative biases, and a prefix.

    Attributes:
      config: its sizes and choices.
    """

    def __post_init__(self) -> None:
        key, written = 'network.DecoderWrapper.config', '@network.TransformerConfig()'
        expect(key, self.config, t5.DecoderOnlyConfig, written)
        super().__post_init__()
