"""T5's span corruption: spans are removed from a text, and the decoder learns to write them.

    text      the  quick brown fox jumps over the lazy dog
    encoder   the  <0>         fox jumps over the <1>       end
    decoder   <0>  quick brown                    <1>  lazy dog  end

A text begins with tokens that stay and ends with a removed span. Texts run across the ends of
documents, and the separators between documents are tokens like any other.

Source of the numbers: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer" (2020), section 3.1.4 and appendix: 15 % in spans of 3 tokens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from train.data.rows.packing import Row, check_within
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
        return self.stream.tokens[start : start + self.length].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class CorruptSpans:
    """Turns a text into a row for an encoder and a decoder.

    Attributes:
      corruption: how much is removed.
      encoder_length: the number of encoder tokens in a row.
      decoder_length: the number of decoder tokens in a row.
      separator: the token at the end, before the decoder's first token, and in the padding.
      first_sentinel: the token that stands for the first span. The second span has the token below
        it, and so on.
    """

    corruption: Corruption
    encoder_length: int
    decoder_length: int
    separator: int
    first_sentinel: int

    def __call__(self, text: np.ndarray, rng: np.random.Generator) -> Row:
        lengths = self.corruption.spans(len(text), rng)
        cut = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        first = cut & ~np.concatenate([[False], cut[:-1]])  # the first token of each removed span
        sentinels = self.first_sentinel - np.arange(len(lengths) // 2)
        encoder = text.copy()
        encoder[first] = sentinels
        spans = np.cumsum(lengths[1::2]) - lengths[1::2]  # where spans begin among removed tokens
        decoder = np.insert(text[cut], spans, sentinels)
        end = np.array([self.separator])
        inputs, segments = self._pad(
            np.concatenate([encoder[~cut | first], end]), self.encoder_length
        )
        targets, weights = self._pad(np.concatenate([decoder, end]), self.decoder_length)
        return {
            'encoder_input_tokens': inputs,
            'encoder_segment_ids': segments,
            'decoder_input_tokens': np.concatenate([end, targets[:-1]]).astype(np.int32),
            'decoder_target_tokens': targets,
            'decoder_loss_weights': weights.astype(np.float32),
        }

    def _pad(self, tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens padded to `length`, and a mask that is 1 at tokens and 0 at padding."""
        row = np.full(length, self.separator, np.int32)
        row[: len(tokens)] = tokens
        return row, (np.arange(length) < len(tokens)).astype(np.int32)


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `parts` integers >= 1 that add up to `total`; every such list is equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
