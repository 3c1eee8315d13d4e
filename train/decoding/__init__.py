"""Decoding: sampling and beam search over any model, and the prediction of a batch."""

from train.decoding.beam_search import beam_search
from train.decoding.caches import find_row_axes
from train.decoding.predict import Predictions, check_can_decode, predict
from train.decoding.sampling import sample
from train.decoding.search import Decoded, DecodingState, Search
from train.decoding.starting import Start, start_decoder_only, start_encoder_decoder

__all__ = [
    'Decoded',
    'DecodingState',
    'Predictions',
    'Search',
    'Start',
    'beam_search',
    'check_can_decode',
    'find_row_axes',
    'predict',
    'sample',
    'start_decoder_only',
    'start_encoder_decoder',
]
