"""Functions that are timed in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def seconds(work: Callable[[], Any]) -> float:
    """Returns the time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    ours: Callable[[], Any], peer: Callable[[], Any], rounds: int, number: int = 1
) -> list[float]:
    """Returns the median seconds of both, and the median of their ratios.

    Args:
      ours, peer: what is called in turns.
      rounds: how often both are measured.
      number: how often they are called in a measurement.
    """

    def mean(work: Callable[[], Any]) -> float:
        return seconds(lambda: [work() for _ in range(number)]) / number

    pairs = [(mean(ours), mean(peer)) for _ in range(rounds)]
    return [statistics.median(t) for t in zip(*((a, b, a / b) for a, b in pairs), strict=True)]


def growth(results: Mapping[int, Sequence[float]]) -> tuple[int, int, list[float]]:
    """Returns the first and the last size, and the exponents with which each time grows.

    Args:
      results: the times of several functions, by the size of what they were called with.
    """
    (few, first), *_, (many, last) = results.items()
    pairs = zip(first, last, strict=True)
    return few, many, [math.log(b / a) / math.log(many / few) for a, b in pairs]
