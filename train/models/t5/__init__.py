"""T5's networks: encoder-decoder and decoder-only transformers with relative position biases."""

from train.models.t5.config import DecoderOnlyConfig, RematPolicy, T5Config
from train.models.t5.decoder_only import DecoderOnly
from train.models.t5.encoder_decoder import T5

__all__ = ['T5', 'DecoderOnly', 'DecoderOnlyConfig', 'RematPolicy', 'T5Config']
