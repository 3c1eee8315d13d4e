"""T5's networks: encoder-decoder and decoder-only transformers with relative position biases."""

from train.models.t5.config import (
    DecoderOnlyConfig as DecoderOnlyConfig,
    RematPolicy as RematPolicy,
    T5Config as T5Config,
)
from train.models.t5.encoder_decoder import T5 as T5, DecoderOnly as DecoderOnly
