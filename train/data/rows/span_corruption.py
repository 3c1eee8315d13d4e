"""T5's span corruption: spans of a text are cut out for the decoder to write.

    text      the  quick brown fox jumps over the lazy dog
    encoder   the  <0>         fox jumps over the <1>       end
    decoder   <0>  quick brown                    <1>  lazy dog  end

A text begins with what stays and ends with what is cut out. Texts run over the ends of documents:
the separators between them are tokens like others.

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
    """How much of a text is cut out.

    Attributes:
      density: share of the tokens that is cut out, between 0 and 1.
      mean_span: tokens of a span, in the mean; 1 or more.
    """

    density: float
    mean_span: float

    def counts(self, length: int) -> tuple[int, int]:
        """(tokens that are cut out, spans that they are in); none of a text of a single token."""
        if length < 2:
            return 0, 0
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = min(max(round(noise / self.mean_span), 1), noise, length - noise)
        return noise, spans

    def lengths(self, length: int) -> tuple[int, int]:
        """Tokens for the encoder and for the decoder, the one at the end included."""
        noise, spans = self.counts(length)
        return length - noise + spans + 1, noise + spans + 1

    def longest_text(self, encoder_length: int) -> int:
        """The longest text whose encoder's part is at most so long; 0 if there is none."""
        # Longer texts never make shorter parts.
        fits, too_long = 0, math.ceil((encoder_length + 2) / (1 - self.density)) + 2
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.lengths(middle)[0] <= encoder_length:
                fits = middle
            else:
                too_long = middle
        return fits if fits >= 2 else 0

    def spans(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Lengths of what stays and what is cut out, in turn: int64 [2 * spans]; one if none is."""
        noise, spans = self.counts(length)
        if not spans:
            return np.array([length])
        parts = [_random_parts(total, spans, rng) for total in (length - noise, noise)]
        return np.stack(parts, axis=1).ravel()


@dataclasses.dataclass(frozen=True)
class Texts:
    """A stream cut into texts of `length` tokens, over the ends of documents."""

    stream: Stream
    length: int

    def __len__(self) -> int:
        return math.ceil(self.stream.num_targets / self.length)

    def __getitem__(self, index: int) -> np.ndarray:
        check_within(index, self)
        # The separator before the first document is nobody's end.
        start = 1 + int(index) * self.length
        return self.stream.tokens[start : start + self.length].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class CorruptSpans:
    """Makes a text a row for an encoder and a decoder.

    Attributes:
      corruption: how much is cut out.
      encoder_length, decoder_length: places of the row.
      separator: the token at the end, before the decoder's first, and in empty places.
      first_sentinel: stands for the first span, the token below it for the second, and so on.
    """

    corruption: Corruption
    encoder_length: int
    decoder_length: int
    separator: int
    first_sentinel: int

    def __call__(self, text: np.ndarray, rng: np.random.Generator) -> Row:
        lengths = self.corruption.spans(len(text), rng)
        cut = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        first = cut & ~np.concatenate([[False], cut[:-1]])  # of its span
        sentinels = self.first_sentinel - np.arange(len(lengths) // 2)
        encoder = text.copy()
        encoder[first] = sentinels
        spans = np.cumsum(lengths[1::2]) - lengths[1::2]  # where they begin in what is cut out
        decoder = np.insert(text[cut], spans, sentinels)
        end = np.array([self.separator])
        inputs, segments = self._filled(
            np.concatenate([encoder[~cut | first], end]), self.encoder_length
        )
        targets, weights = self._filled(np.concatenate([decoder, end]), self.decoder_length)
        return {
            'encoder_input_tokens': inputs,
            'encoder_segment_ids': segments,
            'decoder_input_tokens': np.concatenate([end, targets[:-1]]).astype(np.int32),
            'decoder_target_tokens': targets,
            'decoder_loss_weights': weights.astype(np.float32),
        }

    def _filled(self, tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens in `length` places, and 1 in the places that they fill."""
        row = np.full(length, self.separator, np.int32)
        row[: len(tokens)] = tokens
        return row, (np.arange(length) < len(tokens)).astype(np.int32)


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """`parts` whole numbers of at least 1 that make `total`, each such list as likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
