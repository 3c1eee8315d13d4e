"""Baselines of bits per byte: the entropy of byte frequencies, zlib and xz, and their chart."""

import io
import lzma
import math
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from train.evaluators.held_out import compute_baselines, order0_bits_per_byte
from train.reporting.reports import score_chart

pytestmark = pytest.mark.core


def test_entropy_of_known_texts():
    assert order0_bits_per_byte(bytes(range(256)) * 7) == pytest.approx(8)
    assert order0_bits_per_byte(b'aaaa') == 0
    assert order0_bits_per_byte(b'abcc') == pytest.approx(1.5)


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=20)
def test_entropy_against_the_formula(text):
    expected = -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())
    assert compute_baselines(text)['order-0 entropy'] == pytest.approx(expected, abs=1e-9)


def test_zlib_against_its_own_stream():
    text = b'the quick brown fox ' * 100
    stream = zlib.compressobj(level=9)
    compressed = stream.compress(text) + stream.flush()
    assert zlib.decompress(compressed) == text
    assert compute_baselines(text)['zlib'] == 8 * len(compressed) / len(text) < 0.5
    noise = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    assert 8 <= compute_baselines(noise)['zlib'] < 8.1


def test_xz_against_its_own_stream():
    # A repetition is farther away than zlib sees, and the noise in it cannot be compressed.
    noise = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8).tobytes()
    compressor = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    compressed = compressor.compress(noise * 2) + compressor.flush()
    assert lzma.decompress(compressed) == noise * 2
    scores = compute_baselines(noise * 2)
    assert scores['xz'] == 8 * len(compressed) / 100_000 == pytest.approx(4, abs=0.1)
    assert scores['zlib'] > 8


def printed_chart(scores, encoding='utf-8'):
    """Returns the lines of a chart's table in a pipe, as (name, figure, bar)."""
    pipe = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=pipe, width=80).print(score_chart(scores))
    pipe.seek(0)
    _title, *lines = pipe.read().splitlines()
    return [line.strip().rsplit(maxsplit=2) for line in lines]


def test_a_chart_shows_the_best_first_in_proportion():
    scores = {'this model': 1.9, 'order-0 entropy': 4.8, 'zlib': 2.4, 'xz': 1.2, 'other': math.nan}
    names, figures, bars = zip(*printed_chart(scores), strict=True)
    assert names == ('xz', 'this model', 'zlib', 'order-0 entropy')
    assert figures == ('1.200', '1.900', '2.400', '4.800')
    xz, model, zlib_, order0 = map(len, bars)
    assert 40 <= order0 < 60 and zlib_ / order0 == 1 / 2 and xz / order0 == 1 / 4
    assert model / order0 == pytest.approx(1.9 / 4.8, abs=1 / order0)
    ascii_bars = [bar for _name, _figure, bar in printed_chart(scores, 'ascii')]
    assert [len(bar) for bar in ascii_bars] == [xz, model, zlib_, order0]
