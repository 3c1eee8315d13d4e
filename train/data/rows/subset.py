"""A part of a task's documents, in its own order."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import grain
import numpy as np

from train.data.rows.open_task import EvaluationSet, OpenText, Part
from train.data.rows.order import mix
from train.data.rows.packing import Lengths, Row
from train.data.rows.tasks import TextTask, no_progress
from train.data.text.token_index import Progress, TokenIndex
from train.errors import ConfigError, check_counts

# The names of splits -> the parts of a token index.
SPLITS = {'train': 'training', 'validation': 'held_out', 'test': 'held_out', 'infer': 'held_out'}
_BOUND = r'(-?\d+%?)?'
_SLICE = re.compile(rf'(\w+)(?:\[{_BOUND}:{_BOUND}\])?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset(TextTask):
    """A part of the documents of a task, in its own order.

    Usage:
      Subset(task=task, training='train[:90%]', held_out='train[90%:]')

    Attributes:
      task: the task.
      training: the documents to train on: 'train', 'validation' or 'test', or a slice of them, such
        as 'train[:90%]' or 'train[1000:]'. 'validation' and 'test' are the held-out documents.
      held_out: the documents to evaluate, in the same form.
      shuffle: whether training rows are shuffled. Otherwise they come in the order of the source.
      seed: the seed of the order, by default the seed of the run.
      shuffle_held_out: whether held-out rows are shuffled with `seed`, or 0. It matters if only
        the first of them are evaluated.
    """

    task: TextTask
    training: str = 'train'
    held_out: str = 'validation'
    shuffle: bool = True
    seed: int | None = None
    shuffle_held_out: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.task, TextTask):
            raise ConfigError(f'Subset.task is {str(self.task)[:60]}: it must be a task on text')
        for split in (self.training, self.held_out):
            parse_split(split)
        if self.seed is not None:
            check_counts(minimum=0, **{'Subset.seed': self.seed})

    @property
    def num_tokens(self) -> int:
        return self.task.num_tokens

    @property
    def tokenizer(self) -> Any:
        return getattr(self.task, 'tokenizer', None)

    def blank_row(self, length: Lengths = None) -> Row:
        return self.task.blank_row(length)

    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenSubset:
        opened, parts = self.task.open(length, progress), list[Part]()
        names = ('training', 'held_out', 'shuffle', 'seed')
        default = {name: Subset.__dataclass_fields__[name].default for name in names}
        changed = {n: value for n in names if (value := getattr(self, n)) != default[n]}
        for part in opened.parts:
            training, held_out = (_select(n, part.index) for n in (self.training, self.held_out))
            index = dataclasses.replace(part.index, training=training, held_out=held_out)
            settings = {**part.settings, **changed}
            parts.append(dataclasses.replace(part, index=index, settings=settings))
        return OpenSubset(opened.tokenizer, parts, self)


@dataclasses.dataclass(frozen=True)
class OpenSubset(OpenText):
    """A part of a task that is ready to read."""

    subset: Subset

    def training(self, seed: int) -> grain.MapDataset:
        seed = seed if self.subset.seed is None else self.subset.seed
        shuffled = super().training(seed)  # which checks the rows
        if self.subset.shuffle:
            return shuffled
        rows = [rows.in_order().repeat() for rows in self.training_rows]
        return rows[0] if len(rows) == 1 else mix(rows, [part.weight for part in self.parts])

    def evaluation(self, limit: int | None = None) -> EvaluationSet:
        found = super().evaluation(limit)
        if not self.subset.shuffle_held_out:
            return found
        order = np.random.default_rng(self.subset.seed or 0).permutation(len(found.rows))
        rows = grain.MapDataset.source(order.tolist()).map(found.rows.__getitem__)
        return dataclasses.replace(found, rows=rows)


def parse_split(split: str) -> tuple[str, str | None, str | None]:
    """The name of a split, and the bounds of its slice as they are written.

    Raises a ConfigError if it is malformed, or if there is no such split.
    """
    found = _SLICE.fullmatch(split) if isinstance(split, str) else None
    if not found or found[1] not in SPLITS:
        raise ConfigError(
            f"split is {split!r}: write 'train', 'validation' or 'test', or a slice such as "
            "'train[:90%]' or 'validation[100:200]'"
        )
    return found[1], found[2], found[3]


def _select(split: str, index: TokenIndex) -> Any:
    """The documents of a split, a `Stream` or `Pairs`."""
    name, first, last = parse_split(split)
    documents = getattr(index, SPLITS[name])
    count = documents.num_documents
    begin, end, _ = slice(_place(first, count), _place(last, count)).indices(count)
    if (begin, end) == (0, count):
        return documents
    if begin >= end:
        raise ConfigError(f'split {split!r} is empty: there are {count:,} documents')
    return documents.documents(begin, end)


def _place(bound: str | None, count: int) -> int | None:
    if bound is None:
        return None
    return round(count * int(bound[:-1]) / 100) if bound.endswith('%') else int(bound)
