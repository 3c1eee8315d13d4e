"""Inputs and targets from a text. T5's span corruption removes spans, which are then the targets.

    text      the  quick brown fox jumps over the lazy dog
    inputs    the  <0>         fox jumps over the <1>       end
    targets   <0>  quick brown                    <1>  lazy dog  end

A text begins with tokens that stay and ends with a removed span. Texts run across the ends of
documents, and the separators between documents are tokens like any other.

Source of the numbers: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer" (2020), section 3.1.4 and appendix: 15 % in spans of 3 tokens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from train.data.rows.packing import check_within
from train.data.rows.pairs import Pair
from train.data.text.stream import Stream


@dataclasses.dataclass(frozen=True)
class Corruption:
    """How much of a text is removed.

    Attributes:
      density: the fraction of the tokens that is removed, between 0 and 1.
      mean_span: the mean number of tokens in a removed span, at least 1.
    """

    density: float
    mean_span: float

    def counts(self, length: int) -> tuple[int, int]:
        """The number of removed tokens and of removed spans. A text of one token loses nothing."""
        if length < 2:
            return 0, 0
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = min(max(round(noise / self.mean_span), 1), noise, length - noise)
        return noise, spans

    def lengths(self, length: int) -> tuple[int, int]:
        """The number of encoder tokens and of decoder tokens, including the last separator."""
        noise, spans = self.counts(length)
        return length - noise + spans + 1, noise + spans + 1

    def longest_text(self, encoder_length: int) -> int:
        """The length of the longest text that fits into `encoder_length`, or 0 if none does."""
        # A bisection, because a longer text never has fewer encoder tokens.
        fits, too_long = 0, math.ceil((encoder_length + 2) / (1 - self.density)) + 2
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.lengths(middle)[0] <= encoder_length:
                fits = middle
            else:
                too_long = middle
        return fits if fits >= 2 else 0

    def spans(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Alternating lengths of kept and removed spans, int64 [2 * spans], drawn at random.

        If nothing is removed, the result is [length].
        """
        noise, spans = self.counts(length)
        if not spans:
            return np.array([length])
        parts = [_random_parts(total, spans, rng) for total in (length - noise, noise)]
        return np.stack(parts, axis=1).ravel()


@dataclasses.dataclass(frozen=True)
class Texts:
    """A stream cut into texts of `length` tokens, across the ends of documents."""

    stream: Stream
    length: int

    def __len__(self) -> int:
        return math.ceil(self.stream.num_targets / self.length)

    def __getitem__(self, index: int) -> np.ndarray:
        check_within(index, self)
        # Position 0 is the separator before the first document, which is not part of any text.
        start = 1 + int(index) * self.length
        return self.stream.read(start, start + self.length).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class CorruptSpans:
    """Turns a text into inputs and targets.

    Attributes:
      corruption: how much is removed.
      end: the token at the end of the inputs and of the targets.
      first_sentinel: the token that stands for the first span. The second span has the token below
        it, and so on.
    """

    corruption: Corruption
    end: int
    first_sentinel: int

    def __call__(self, text: np.ndarray, rng: np.random.Generator) -> Pair:
        lengths = self.corruption.spans(len(text), rng)
        cut = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        first = cut & ~np.concatenate([[False], cut[:-1]])  # the first token of each removed span
        sentinels = self.first_sentinel - np.arange(len(lengths) // 2)
        inputs = text.copy()
        inputs[first] = sentinels
        spans = np.cumsum(lengths[1::2]) - lengths[1::2]  # where spans begin among removed tokens
        targets = np.insert(text[cut], spans, sentinels)
        end = np.array([self.end], text.dtype)
        return np.concatenate([inputs[~cut | first], end]), np.concatenate([targets, end])


@dataclasses.dataclass(frozen=True)
class CutAtRandom:
    """Turns a text into inputs, its beginning, and targets, the rest. Each has a token or more.

    Attributes:
      end: the token at the end of the targets.
    """

    end: int

    def __call__(self, text: np.ndarray, rng: np.random.Generator) -> Pair:
        place = int(rng.integers(1, len(text))) if len(text) > 1 else 0
        return text[:place], np.append(text[place:], text.dtype.type(self.end))


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `parts` integers >= 1 that add up to `total`; every such list is equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
