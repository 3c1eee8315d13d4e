"""Decoding: sampling and beam search over any model, and the prediction of a batch."""

from train.decoding.beams import beam_search
from train.decoding.interface import Decoded, DecodingState, Search, find_row_axes
from train.decoding.predicting import Predictions, check_can_decode, predict
from train.decoding.sampling import sample
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
