"""Decodes tokens from any model, by sampling or by beam search, and predicts batches."""

from train.decoding.beams import beam_search as beam_search
from train.decoding.interface import (
    Decoded as Decoded,
    DecodingState as DecodingState,
    Search as Search,
    find_row_axes as find_row_axes,
)
from train.decoding.sampling import sample as sample
from train.decoding.starting import (
    Predictions as Predictions,
    Start as Start,
    check_can_decode as check_can_decode,
    predict as predict,
    start_decoder_only as start_decoder_only,
    start_encoder_decoder as start_encoder_decoder,
)
