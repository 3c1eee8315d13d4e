"""Rows: how many tokens they have, and how a token stream is cut or packed into them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sized

import numpy as np

from train.data.text.stream import Stream
from train.errors import ConfigError, check_counts

# The number of tokens in a row, or the numbers of its inputs and targets. Without a number, inputs
# or targets are not cut.
Lengths = int | Mapping[str, int | None] | None
FEATURES = ('inputs', 'targets')


def check_lengths(name: str, lengths: Lengths) -> None:
    """Checks the lengths that a setting of this name has.

    Raises a ConfigError if it is neither a number nor a mapping of numbers.
    """
    if isinstance(lengths, Mapping):
        if not lengths or not set(lengths) <= set(FEATURES):
            raise ConfigError(
                f"{name} is {dict(lengths)!r}: write {{'inputs': 512, 'targets': 114}}, the "
                'numbers of tokens'
            )
        numbers = {f'{name}[{feature!r}]': length for feature, length in lengths.items()}
    else:
        numbers = {name: lengths}
    for label, number in numbers.items():
        if number is not None:
            check_counts(**{label: number})


def target_length(lengths: Lengths) -> int:
    """The number of tokens in a row of a task that has only targets.

    Raises a ConfigError if there is no such number, or if there is one for inputs.
    """
    check_lengths('sequence_length', lengths)
    if isinstance(lengths, Mapping):
        if lengths.get('inputs') is not None:
            raise ConfigError(
                f'sequence_length is {dict(lengths)}, but the rows of this task have only targets: '
                f"write {{'targets': {lengths.get('targets')}}}, or use a task with inputs"
            )
        lengths = lengths.get('targets')
    if lengths is None:
        raise ConfigError('a task on text needs the number of tokens in a row: set sequence_length')
    return lengths


def pair_lengths(lengths: Lengths) -> tuple[int | None, int | None]:
    """The numbers of input tokens and of target tokens in a row; None for those that are not given.

    Raises a ConfigError if `lengths` is one number.
    """
    check_lengths('sequence_length', lengths)
    if isinstance(lengths, int):
        raise ConfigError(
            f'sequence_length is {lengths}, but the rows of this task have inputs and targets: '
            f"write {{'inputs': {lengths}, 'targets': {lengths}}}"
        )
    lengths = lengths or {}
    return lengths.get('inputs'), lengths.get('targets')


Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SplitRows:
    """A stream cut into rows of `length` targets. The input of a target is the token before it.

    Rows follow each other without gaps, across the ends of documents. The last row is filled up
    with separators of weight 0.
    """

    stream: Stream
    length: int
    separator: int

    def __len__(self) -> int:
        return math.ceil(self.stream.num_targets / self.length)

    def __getitem__(self, index: int) -> Row:
        check_within(index, self)
        start = int(index) * self.length
        row = self.stream.read(start, start + self.length + 1).astype(np.int32)
        weights = np.zeros(self.length, np.float32)
        weights[: len(row) - 1] = 1
        row = np.pad(row, (0, self.length + 1 - len(row)), constant_values=self.separator)
        return {
            'decoder_input_tokens': row[:-1],
            'decoder_target_tokens': row[1:],
            'decoder_loss_weights': weights,
        }


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents packed into rows of `length` targets, so that little padding is needed.

    A document longer than a row is cut into pieces that fill whole rows, and a remainder. Attention
    and positions restart with each piece: `decoder_segment_ids` are 1, 2, ... and 0 for padding,
    and `decoder_positions` count from 0.

    Attributes:
      starts: int64 [pieces], where each piece begins in the stream, in the order of the rows.
      lengths: int64 [pieces], the number of targets of each piece.
      first_pieces: int64 [rows + 1], the first piece of each row.
    """

    stream: Stream
    length: int
    separator: int
    starts: np.ndarray
    lengths: np.ndarray
    first_pieces: np.ndarray

    def __len__(self) -> int:
        return len(self.first_pieces) - 1

    def __getitem__(self, index: int) -> Row:
        check_within(index, self)
        inputs, targets = np.full((2, self.length), self.separator, np.int32)
        segments, positions = np.zeros((2, self.length), np.int32)
        place = 0
        pieces = range(self.first_pieces[index], self.first_pieces[index + 1])
        for segment, piece in enumerate(pieces, 1):
            start, length = self.starts[piece], self.lengths[piece]
            here = slice(place, place + length)
            tokens = self.stream.read(start, start + length + 1)
            inputs[here], targets[here] = tokens[:-1], tokens[1:]
            segments[here], positions[here] = segment, np.arange(length)
            place += length
        return {
            'decoder_input_tokens': inputs,
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (segments > 0).astype(np.float32),
            'decoder_segment_ids': segments,
            'decoder_positions': positions,
        }


def blank_tokens(length: int, packed: bool = False) -> Row:
    """A row of zeros, with the arrays of `SplitRows` or of `PackedRows`."""
    tokens, weights = np.zeros(length, np.int32), np.zeros(length, np.float32)
    names = ['decoder_input_tokens', 'decoder_target_tokens']
    if packed:
        names += ['decoder_segment_ids', 'decoder_positions']
    return dict.fromkeys(names, tokens) | {'decoder_loss_weights': weights}


def check_within(index: int, rows: Sized) -> None:
    """Raises an IndexError if there is no row with this index, which ends a loop over the rows."""
    if not 0 <= index < len(rows):
        raise IndexError(f'there is no row {index}: there are {len(rows)} rows')


def pack(stream: Stream, length: int, separator: int) -> PackedRows:
    """Packs the documents of a stream into rows by best-fit decreasing.

    Long documents come first, and each document goes into the fullest row that has room for it.
    """
    starts, lengths = _pieces(stream, length)
    rows = best_fit(lengths, length)
    order = np.argsort(rows, kind='stable')
    first_pieces = np.searchsorted(rows[order], np.arange(int(rows.max(initial=-1)) + 2))
    return PackedRows(stream, length, separator, starts[order], lengths[order], first_pieces)


def _pieces(stream: Stream, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The start and the length of each piece, after cutting documents to `length` targets."""
    firsts = np.asarray(stream.starts[:-1])
    targets = np.diff(stream.starts)
    counts = -(-targets // length)
    document = np.repeat(np.arange(len(targets)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return firsts[document] + number * length, np.minimum(
        targets[document] - number * length, length
    )


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assigns items to bins: the longest items first, each to the fullest bin that has room.

    Items of the same length are placed together, so the time hardly grows with their number.
    `lengths` has integers [items] from 1 to `capacity`. Returns the bin of each item, int64
    [items], numbered from 0 in the order of their opening.
    """
    bins = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind='stable')
    sizes, firsts, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    with_room: dict[int, list[np.ndarray]] = {}  # free space -> the bins that have it
    rooms = 0  # bit r is set if some bin has r free
    opened = 0
    for size, first, count in zip((-sizes).tolist(), firsts, counts, strict=True):
        items = order[first : first + count]
        while len(items):
            fitting = rooms >> size
            if fitting:
                room = (
                    size + (fitting & -fitting).bit_length() - 1
                )  # the least free space that suffices
                candidates = with_room[room].pop()
                if not with_room[room]:
                    rooms ^= 1 << room
            else:
                room = capacity
                candidates = opened + np.arange(-(-len(items) // (capacity // size)))
                opened += len(candidates)
            # Each bin takes as many items of this size as fit before the next bin is used.
            each = room // size
            used = min(len(candidates), -(-len(items) // each))
            placed, items = np.split(items, [min(len(items), used * each)])
            bins[placed] = np.repeat(candidates[:used], each)[: len(placed)]
            full, last = divmod(len(placed), each)
            rooms = _keep(with_room, rooms, room - each * size, candidates[:full])
            if last:
                rooms = _keep(with_room, rooms, room - last * size, candidates[full:used])
            rooms = _keep(with_room, rooms, room, candidates[used:])
    return bins


def _keep(with_room: dict[int, list[np.ndarray]], rooms: int, room: int, bins: np.ndarray) -> int:
    """Records bins that have `room` left, and returns `rooms` with that bit set."""
    if not room or not len(bins):
        return rooms
    with_room.setdefault(room, []).append(bins)
    return rooms | 1 << room
