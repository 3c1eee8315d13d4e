"""Examples of an input text and a target text, from files or lists."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from train.data.rows.open_task import OpenText, Part, Rows
from train.data.rows.packing import FEATURES, Lengths, Row, pair_lengths
from train.data.rows.pair_tasks import MakeRow, PairTask, check_padding
from train.data.rows.pairs import Ending, PairRows, Pairs
from train.data.rows.tasks import no_progress
from train.data.text.sources import Records, Source
from train.data.text.token_index import Progress, TokenIndex, open_index
from train.data.text.tokenizers import ByT5Tokenizer, Tokenizer
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputsToTargets(PairTask):
    """Examples of an input text and a target text, as in T5's downstream tasks.

    Usage:
      InputsToTargets(source=JsonLines(pattern='train.jsonl'), tokenizer=tokenizer)
      InputsToTargets(source=[('translate: hello', 'hallo'), ...])

    With `sequence_length={'inputs': 512, 'targets': 114}`, longer texts are cut. Without a number,
    rows are as long as the longest text. A list of pairs is tokenized at every start.

    Attributes:
      source: the examples: files with fields, or a list of pairs. The fields can also be lists of
        tokens.
      held_out: the examples to evaluate, in the same form. By default, `source.holdout_percent` of
        the source is held out.
      inputs: the name of the field with the inputs, or its number if fields have no names. With
        None, examples have only targets.
      targets: the same for the targets. With None, examples have only inputs, to predict from.
      tokenizer: turns the texts into tokens.
      inputs_tokenizer: turns the inputs into tokens, by default `tokenizer`.
      add_end: the features that get an end token, of 'inputs' and 'targets'.
      keep_end: whether a text that is cut still ends in the end token.
      cut: whether longer texts are cut to the lengths of rows. Otherwise, they are errors.
      cache_dir: the directory where token indices are stored; by default, a directory in the user's
        cache.
    """

    source: Source | Sequence[tuple[Any, Any]]
    held_out: Source | Sequence[tuple[Any, Any]] | None = None
    inputs: str | int | None = 'inputs'
    targets: str | int | None = 'targets'
    tokenizer: Tokenizer = dataclasses.field(default_factory=ByT5Tokenizer)
    inputs_tokenizer: Tokenizer | None = None
    add_end: Sequence[str] = FEATURES
    keep_end: bool = True
    cut: bool = True
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ('tokenizer', 'inputs_tokenizer'):
            value = getattr(self, name)
            if not isinstance(value, Tokenizer) and not (value is None and name[0] == 'i'):
                raise ConfigError(f'InputsToTargets.{name} is {value!r}: it must be a Tokenizer')
        if self.inputs is None and self.targets is None:
            raise ConfigError('InputsToTargets.inputs and targets are both None: name a field')
        if self.inputs is None and self.architecture == 'encoder_decoder':
            raise ConfigError(
                'InputsToTargets.inputs is None, but an encoder needs inputs: name a field, or use '
                "architecture = 'decoder_only'"
            )
        if isinstance(self.add_end, str) or not set(self.add_end) <= set(FEATURES):
            raise ConfigError(f'InputsToTargets.add_end is {self.add_end!r}: use {FEATURES}')
        for name in ('source', 'held_out'):
            self._as_source(name)

    @property
    def num_tokens(self) -> int:
        return max(tokenizer.num_tokens for tokenizer in self._tokenizers)

    @property
    def _tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.inputs_tokenizer or self.tokenizer, self.tokenizer

    def _as_source(self, name: str) -> Source | None:
        value = getattr(self, name)
        if isinstance(value, Source) or (value is None and name == 'held_out'):
            return value
        if isinstance(value, list | tuple) and all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
        ):
            examples = [{self.inputs: inputs, self.targets: targets} for inputs, targets in value]
            return Records(records=examples, holdout_percent=0.0)
        raise ConfigError(
            f'InputsToTargets.{name} is {str(value)[:60]}: it must be a Source or a list of pairs; '
            'in a gin file write @JsonLines(), with the parentheses'
        )

    def blank_row(self, length: Lengths = None) -> Row:
        if self.inputs is None and isinstance(length, int):
            length = {'targets': length}
        inputs, targets = pair_lengths(length)
        if targets is None or (inputs is None and self.inputs is not None):
            raise ConfigError(
                f'sequence_length is {length}, so rows are as long as the longest text of the '
                "data: write both numbers of tokens, such as {'inputs': 512, 'targets': 114}"
            )
        return self.make_row_of(inputs or 0, targets, self.inputs is not None)([])

    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenText:
        for tokenizer in self._tokenizers:
            check_padding(tokenizer)
        source, held_out = self._as_source('source'), self._as_source('held_out')
        assert source is not None
        if held_out is None:
            index = self._index(source, progress)
        elif held_out == source:
            index = self._index(dataclasses.replace(source, holdout_percent=0.0), progress)
            index = dataclasses.replace(index, held_out=index.training)
        else:
            training = self._index(dataclasses.replace(source, holdout_percent=0.0), progress)
            other = self._index(dataclasses.replace(held_out, holdout_percent=100.0), progress)
            index = TokenIndex(
                training.training,
                other.held_out,
                _joint_hash([training.content_hash, other.content_hash]),
                training.directory,
            )
        lengths, has_inputs = self._lengths(length, index), self.inputs is not None
        make_row = self.make_row_of(*lengths, has_inputs)
        endings = []
        for feature, tokenizer, size in zip(FEATURES, self._tokenizers, lengths, strict=True):
            has_end = feature in self.add_end and getattr(self, feature) is not None
            endings.append(Ending(size, tokenizer.separator if has_end else None, self.keep_end))
        part = Part(
            name=self.name or str(getattr(source, 'pattern', type(source).__name__)),
            index=index,
            rows=functools.partial(_pair_rows, endings=endings, make_row=make_row),
            settings={
                'task': type(self).__name__,
                'architecture': self.architecture,
                'pack': self.pack,
                'inputs': self.inputs,
                'targets': self.targets,
                'add_end': list(self.add_end),
                'keep_end': self.keep_end,
            },
            scores_bytes=False,
            metrics=tuple(self.metrics),
            postprocess=self.postprocess,
            inputs_tokenizer=self.inputs_tokenizer,
        )
        return OpenText(self.tokenizer, [part])

    def _index(self, source: Source, progress: Progress) -> Any:
        """The index of each field, joined into one index of pairs."""
        found = [
            None if field is None else open_index(source.select(field), t, self.cache_dir, progress)
            for field, t in zip((self.inputs, self.targets), self._tokenizers, strict=True)
        ]
        indices = [index for index in found if index is not None]
        training, held_out = (
            Pairs(*(None if index is None else getattr(index, part) for index in found))
            for part in ('training', 'held_out')
        )
        joint = _joint_hash([index.content_hash for index in indices])
        return TokenIndex(training, held_out, joint, indices[0].directory)

    def _lengths(self, lengths: Lengths, index: Any) -> tuple[int, int]:
        """The numbers of input and target tokens in a row; by default, of the longest example."""
        if self.inputs is None and isinstance(lengths, int):
            lengths = {'targets': lengths}
        found = []
        for i, (feature, given) in enumerate(zip(FEATURES, pair_lengths(lengths), strict=True)):
            has_feature = getattr(self, feature) is not None
            parts = (index.training, index.held_out)
            longest = max(int(part.lengths[i].max(initial=0)) for part in parts)
            longest += has_feature and feature in self.add_end
            length = (given or max(longest, 1)) if has_feature or feature == 'targets' else 0
            if longest > length and not self.cut:
                raise ConfigError(
                    f'the longest {feature} have {longest} tokens, but rows have {length}: use '
                    f'{longest} or more, or set InputsToTargets.cut to cut them'
                )
            found.append(length)
        return found[0], found[1]


def _pair_rows(pairs: Any, endings: Sequence[Ending], make_row: MakeRow) -> Rows:
    first_examples = None
    if make_row.packed:
        inputs, targets = (
            ending.lengths(lengths) for ending, lengths in zip(endings, pairs.lengths, strict=True)
        )
        first_examples = make_row.pack(inputs, targets)
    return Rows(PairRows(pairs, endings, make_row, first_examples))


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashlib.blake2b(' '.join(hashes).encode(), digest_size=16).hexdigest()
