"""Baselines for a language model: the bits per byte of simple models on the same text."""

from __future__ import annotations

import zlib

import numpy as np


def compute(text: bytes) -> dict[str, float]:
    """Bits per byte of every baseline, by name."""
    return {'order-0 entropy': order0_bits_per_byte(text), 'zlib': zlib_bits_per_byte(text)}


def order0_bits_per_byte(text: bytes) -> float:
    """The entropy of the byte frequencies, in bits: the lower bound for a model without context."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    p = counts[counts > 0] / len(text)
    return float(-np.sum(p * np.log2(p)))


def zlib_bits_per_byte(text: bytes) -> float:
    """Bits per byte of `zlib.compress(text, 9)`."""
    return 8 * len(zlib.compress(text, 9)) / len(text)
