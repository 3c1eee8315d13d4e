"""Baselines of bits per byte: the entropy of byte frequencies, and zlib."""

import math
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from train.data import baselines

pytestmark = pytest.mark.core


def test_entropy_of_known_texts():
    assert baselines.order0_bits_per_byte(bytes(range(256)) * 7) == pytest.approx(8)
    assert baselines.order0_bits_per_byte(b'aaaa') == 0
    assert baselines.order0_bits_per_byte(b'abcc') == pytest.approx(1.5)


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None, max_examples=50)
def test_entropy_against_the_formula(text):
    expected = -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())
    assert baselines.compute(text)['order-0 entropy'] == pytest.approx(expected, abs=1e-9)


def test_zlib_against_its_own_stream():
    text = b'the quick brown fox ' * 100
    stream = zlib.compressobj(level=9)
    compressed = stream.compress(text) + stream.flush()
    assert zlib.decompress(compressed) == text
    assert baselines.compute(text)['zlib'] == 8 * len(compressed) / len(text) < 0.5
    noise = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    assert 8 <= baselines.compute(noise)['zlib'] < 8.1
