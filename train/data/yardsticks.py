"""What simple models of the same bytes reach, beside a language model's bits per byte."""

from __future__ import annotations

import zlib

import numpy as np


def of(text: bytes) -> dict[str, float]:
    """All of them, by name."""
    return {'order-0 entropy': order0_bits_per_byte(text), 'zlib -9': zlib_bits_per_byte(text)}


def order0_bits_per_byte(text: bytes) -> float:
    """Entropy of the byte frequencies of a text, in bits: what no context at all can reach."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    p = counts[counts > 0] / len(text)
    return float(-np.sum(p * np.log2(p)))


def zlib_bits_per_byte(text: bytes) -> float:
    """Bits a byte of `zlib.compress(text, 9)`."""
    return 8 * len(zlib.compress(text, 9)) / len(text)
