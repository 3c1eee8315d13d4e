"""Examples of inputs and targets, and the rows that an encoder-decoder or a decoder reads.

Source of the arrays: the feature converters of seqio 0.0.20, whose names of arrays are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from train.data.rows.packing import Row, check_within
from train.data.text.stream import Stream
from train.data.text.tokenizers import Tokenizer

# The tokens of the inputs and of the targets of one example.
Pair = tuple[np.ndarray, np.ndarray]
PADDING = 0
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Examples of inputs and targets, one of which may be None; equal numbers belong together."""

    inputs: Stream | None
    targets: Stream | None

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> Pair:
        check_within(index, self)
        inputs, targets = (
            _NOTHING if stream is None else stream.document(int(index)).astype(np.int32)
            for stream in (self.inputs, self.targets)
        )
        return inputs, targets

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens of the inputs and of the targets of each example."""
        zeros = np.zeros(len(self), np.int64)
        inputs, targets = (
            zeros if stream is None else np.diff(stream.starts) - 1
            for stream in (self.inputs, self.targets)
        )
        return inputs, targets

    @property
    def num_documents(self) -> int:
        return self._streams[0].num_documents

    @property
    def num_bytes(self) -> int:
        """The size of the inputs and targets, in bytes."""
        return sum(stream.num_bytes for stream in self._streams)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens of the targets, or of the inputs if there are no targets; see `Stream.read`."""
        return self._streams[-1].read(start, stop)

    @property
    def _streams(self) -> list[Stream]:
        return [stream for stream in (self.inputs, self.targets) if stream is not None]

    def head(self, num_targets: int, tokenizer: Tokenizer) -> Pairs:
        """The first examples, up to the one with target number `num_targets`."""
        ends = np.asarray(self._streams[-1].starts[1:])
        return self.documents(0, min(int(np.searchsorted(ends, num_targets)) + 1, len(self)))

    def documents(self, first: int, last: int) -> Pairs:
        """The examples from number `first` up to, but without, number `last`."""
        inputs, targets = (
            None if stream is None else stream.documents(first, last)
            for stream in (self.inputs, self.targets)
        )
        return Pairs(inputs, targets)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the tokens of a feature are cut to a length, and whether they end in an end token.

    Attributes:
      length: the greatest number of tokens, including the end token.
      end: the end token, or None to add none.
      kept: whether a text that is cut still ends in the end token.
    """

    length: int
    end: int | None
    kept: bool = True

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        if self.end is None:
            return tokens[: self.length]
        if self.kept:
            tokens = tokens[: self.length - 1]
        return np.append(tokens, np.int32(self.end))[: self.length]

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """The numbers of tokens after cutting texts of `lengths` tokens."""
        return np.minimum(lengths + (self.end is not None), self.length)


@dataclasses.dataclass(frozen=True)
class PairRows:
    """Rows of one example, or of several that are packed into a row.

    Attributes:
      make_row: makes a row from examples whose tokens fit.
      first_examples: int64 [rows + 1], the first example of each row. With None, each example is a
        row.
    """

    pairs: Pairs
    endings: Sequence[Ending]
    make_row: Callable[[Sequence[Pair]], Row]
    first_examples: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pairs) if self.first_examples is None else len(self.first_examples) - 1

    def __getitem__(self, index: int) -> Row:
        check_within(index, self)
        numbers = range(int(index), int(index) + 1)
        if self.first_examples is not None:
            numbers = range(self.first_examples[index], self.first_examples[index + 1])
        cut_inputs, cut_targets = self.endings
        examples = (self.pairs[number] for number in numbers)
        return self.make_row([(cut_inputs(x), cut_targets(y)) for x, y in examples])


@dataclasses.dataclass(frozen=True)
class EncoderDecoderRow:
    """Makes a row of an encoder and a decoder, [inputs] and [targets].

    `packed` says whether a row describes its segments: ids 1, 2, ... and positions from 0.
    """

    inputs: int
    targets: int
    packed: bool = False

    def __call__(self, examples: Sequence[Pair]) -> Row:
        encoder, encoder_segments, encoder_positions = _join([x for x, _ in examples], self.inputs)
        targets, segments, positions = _join([y for _, y in examples], self.targets)
        row = {
            'encoder_input_tokens': encoder,
            'decoder_input_tokens': _shift(targets, positions if self.packed else None),
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (targets != PADDING).astype(np.float32),
        }
        if self.packed:
            row |= {
                'encoder_segment_ids': encoder_segments,
                'encoder_positions': encoder_positions,
                'decoder_segment_ids': segments,
                'decoder_positions': positions,
            }
        return row

    def pack(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Packs examples with these numbers of tokens; see `pack_in_order`."""
        return pack_in_order([(inputs, self.inputs), (targets, self.targets)])


@dataclasses.dataclass(frozen=True)
class PrefixRow:
    """Makes a row of a decoder: the inputs of each example, then its targets.

    The loss counts targets only. `decoder_causal_attention` is 1 on the inputs and one place more:
    these tokens may see each other. Without inputs, a row has no such array. `packed` says whether
    a row describes its segments: ids 1, 2, ... and positions from 0.
    """

    length: int
    has_inputs: bool = True
    packed: bool = False

    def __call__(self, examples: Sequence[Pair]) -> Row:
        tokens, segments, positions = _join([np.append(x, y) for x, y in examples], self.length)
        weights = (tokens != PADDING).astype(np.float32)
        prefix = np.zeros(self.length, np.int32)
        start = 0
        for inputs, targets in examples:
            end = start + len(inputs) + len(targets)
            weights[start : start + len(inputs)] = 0
            prefix[start : min(start + len(inputs) + 1, end if self.packed else self.length)] = 1
            start = end
        row = {
            'decoder_input_tokens': _shift(tokens, positions if self.packed else None),
            'decoder_target_tokens': tokens,
            'decoder_loss_weights': weights,
        }
        if self.has_inputs:
            row['decoder_causal_attention'] = prefix
        if self.packed:
            row |= {'decoder_segment_ids': segments, 'decoder_positions': positions}
        return row

    def pack(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Packs examples with these numbers of tokens; see `pack_in_order`."""
        return pack_in_order([(inputs + targets, self.length)])


def pack_in_order(features: Sequence[tuple[np.ndarray, int]]) -> np.ndarray:
    """Packs examples in their order, and returns the first one of each row, int64 [rows + 1].

    A row ends where the next example does not fit.

    Args:
      features: for each feature, int [examples], the number of tokens of each example, and the
        number of tokens in a row. No example is longer than a row.
    """
    count = len(features[0][0])
    following = np.full(count, count)  # the first example that does not fit after this one
    for lengths, room in features:
        ends = np.cumsum(lengths)
        following = np.minimum(following, np.searchsorted(ends, ends - lengths + room, 'right'))
    firsts, steps = [0], following.tolist()
    while firsts[-1] < count:
        firsts.append(steps[firsts[-1]])
    return np.array(firsts)


def _join(parts: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens one after another, padded to `length`, with their segment ids and positions."""
    tokens, segments, positions = np.zeros((3, length), np.int32)
    start = 0
    for segment, part in enumerate(parts, 1):
        here = slice(start, start + len(part))
        tokens[here], segments[here], positions[here] = part, segment, np.arange(len(part))
        start += len(part)
    return tokens, segments, positions


def _shift(tokens: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    """The tokens one place later, as a decoder reads them; every segment begins with 0."""
    shifted = np.concatenate([[PADDING], tokens[:-1]]).astype(np.int32)
    return shifted if positions is None else np.where(positions > 0, shifted, np.int32(PADDING))
