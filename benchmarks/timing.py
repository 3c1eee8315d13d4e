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
    """Calls both in turns; returns the median seconds of both, and the median of their ratios.

    They are measured `rounds` times, and called `number` times in each measurement.
    """

    def mean(work: Callable[[], Any]) -> float:
        return seconds(lambda: [work() for _ in range(number)]) / number

    pairs = [(mean(ours), mean(peer)) for _ in range(rounds)]
    return [statistics.median(t) for t in zip(*((a, b, a / b) for a, b in pairs), strict=True)]


def medians(
    works: Mapping[str, Callable[[], Sequence[float]]], rounds: int
) -> dict[str, list[float]]:
    """Measures each of `works` once a round; returns the medians of its figures.

    Every second round is in the reverse order.
    """
    found: dict[str, list[Sequence[float]]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            found[name].append(works[name]())
    return {
        name: [statistics.median(values) for values in zip(*figures, strict=True)]
        for name, figures in found.items()
    }


def growth(results: Mapping[int, Sequence[float]]) -> tuple[int, int, list[float]]:
    """Returns the first and the last size, and the exponents with which times grow with sizes."""
    (few, first), *_, (many, last) = results.items()
    pairs = zip(first, last, strict=True)
    return few, many, [math.log(b / a) / math.log(many / few) for a, b in pairs]
