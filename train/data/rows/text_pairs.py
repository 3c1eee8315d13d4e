"""Tasks that make inputs and targets from text: span corruption, and prefix language modeling.

T5's span corruption removes spans, which are then the targets:

    text      the  quick brown fox jumps over the lazy dog
    inputs    the  <0>         fox jumps over the <1>       end
    targets   <0>  quick brown                    <1>  lazy dog  end

A text begins with tokens that stay and ends with a removed span. Texts run across the ends of
documents, and the separators between documents are tokens like any other.

Source of the numbers: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer" (2020), section 3.1.4 and appendix: 15 % in spans of 3 tokens.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from train.data.rows.open_task import Rows
from train.data.rows.packing import Lengths, Row, check_lengths, check_within, pair_lengths
from train.data.rows.pair_tasks import Architecture, PairTask, check_padding
from train.data.rows.pairs import Pair
from train.data.rows.tasks import SourceTask
from train.data.text.stream import Stream
from train.data.text.tokenizers import ByT5Tokenizer, Tokenizer
from train.errors import ConfigError, check_counts


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
        texts = range(math.ceil((encoder_length + 2) / (1 - self.density)) + 2)
        # A bisection, because a longer text never has fewer encoder tokens.
        fits = bisect.bisect(texts, encoder_length, key=lambda length: self.lengths(length)[0]) - 1
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


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `parts` integers >= 1 that add up to `total`; every such list is equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPairTask(SourceTask, PairTask):
    """A task that makes inputs and targets of each piece of a text."""

    tokenizer: Tokenizer = dataclasses.field(default_factory=ByT5Tokenizer)

    _scores_bytes = False
    # Whether inputs and targets are cut to their numbers of tokens.
    _cuts = True

    def __post_init__(self) -> None:
        SourceTask.__post_init__(self)
        PairTask.__post_init__(self)

    def blank_row(self, length: Lengths = None) -> Row:
        _, inputs, targets = self._row_lengths(length)
        return self.make_row_of(inputs, targets)([])

    def _rows(self, lengths: Lengths) -> Callable[[Stream], Rows]:
        check_padding(self.tokenizer)
        text_length, inputs, targets = self._row_lengths(lengths)
        limits = (inputs, targets) if self._cuts else (inputs + targets,) * 2
        make_pair, make_row = self._make_pair(), self.make_row_of(inputs, targets)

        def make(text: np.ndarray, rng: np.random.Generator) -> Row:
            x, y = make_pair(text, rng)
            return make_row([(x[: limits[0]], y[: limits[1]])])

        return lambda stream: Rows(Texts(stream, text_length), make)

    @abc.abstractmethod
    def _row_lengths(self, lengths: Lengths) -> tuple[int, int, int]:
        """The number of tokens in a text, in its inputs, and in its targets."""

    @abc.abstractmethod
    def _make_pair(self) -> Callable[[np.ndarray, np.random.Generator], Pair]:
        """A function that makes inputs and targets of a text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption(TextPairTask):
    """T5's pretraining: the targets are the spans that were removed from the inputs.

    Every text fills a row, so `pack` only adds the segment ids and positions.

    Attributes:
      noise_density: the fraction of the tokens that is removed.
      mean_noise_span_length: the mean number of tokens in a removed span.
      num_sentinels: the number of tokens that are added to the tokenizer's to stand for removed
        spans; the last of them stands for the first span. With 0, the last tokens of the tokenizer
        stand for spans, as in T5's own vocabularies.
    """

    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0
    num_sentinels: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(minimum=0, num_sentinels=self.num_sentinels)
        density, span = self.noise_density, self.mean_noise_span_length
        if not isinstance(density, float) or not 0 < density < 1:
            raise ConfigError(f'noise_density is {density!r}: it must be a number between 0 and 1')
        if not isinstance(span, int | float) or not 1 <= span < math.inf:
            raise ConfigError(
                f'mean_noise_span_length is {span!r}: it must be a finite number >= 1'
            )

    @property
    def num_tokens(self) -> int:
        return self.tokenizer.num_tokens + self.num_sentinels

    @property
    def _corruption(self) -> Corruption:
        return Corruption(self.noise_density, self.mean_noise_span_length)

    def _row_lengths(self, lengths: Lengths) -> tuple[int, int, int]:
        check_lengths('sequence_length', lengths)
        given = (lengths, None) if isinstance(lengths, int) else pair_lengths(lengths)
        if (length := given[0]) is None:
            raise ConfigError(
                'span corruption needs the number of input tokens in a row: write sequence_length '
                "= {'inputs': 512, 'targets': 114}"
            )
        corruption = self._corruption
        text_length = corruption.longest_text(length)
        if not text_length:
            raise ConfigError(
                f'no text fits into {length} encoder tokens: use a length of at least 4'
            )
        spans = corruption.counts(text_length)[1]
        if 0 < self.num_sentinels < spans:
            raise ConfigError(
                f'a text of {text_length} tokens has {spans} spans: num_sentinels '
                f'({self.num_sentinels}) must be at least {spans}'
            )
        return text_length, length, given[1] or corruption.lengths(text_length)[1]

    def _make_pair(self) -> Callable[[np.ndarray, np.random.Generator], Pair]:
        return CorruptSpans(self._corruption, self.tokenizer.separator, self.num_tokens - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLM(TextPairTask):
    """Prefix language modeling: a text is cut at a random place, and its rest is predicted.

    The pieces of text are as long as a row of a decoder allows. An encoder and a decoder get pieces
    that fit into the shorter of them.
    """

    architecture: Architecture = 'decoder_only'

    _cuts = False

    @property
    def num_tokens(self) -> int:
        return self.tokenizer.num_tokens

    def _row_lengths(self, lengths: Lengths) -> tuple[int, int, int]:
        check_lengths('sequence_length', lengths)
        decoder_only = self.architecture == 'decoder_only'
        if isinstance(lengths, int) and decoder_only:
            lengths = {'inputs': lengths - 1, 'targets': 1}
        inputs, targets = pair_lengths(lengths)
        if inputs is None or targets is None:
            raise ConfigError(
                'PrefixLM needs the number of tokens in a row: write sequence_length = '
                "{'inputs': 512, 'targets': 512}"
            )
        text_length = inputs + targets - 1 if decoder_only else min(inputs, targets)
        if text_length < 2:
            raise ConfigError(f'sequence_length is {lengths}, too short to be cut into two parts')
        return text_length, inputs, targets

    def _make_pair(self) -> Callable[[np.ndarray, np.random.Generator], Pair]:
        def cut(text: np.ndarray, rng: np.random.Generator) -> Pair:
            """Cuts a text into its beginning and the rest. Each has a token or more."""
            place = int(rng.integers(1, len(text))) if len(text) > 1 else 0
            return text[:place], np.append(text[place:], text.dtype.type(self.tokenizer.separator))

        return cut
