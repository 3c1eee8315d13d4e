"""The base class of tasks with inputs and targets, and how they are adapted to a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from train.data.rows.pairs import EncoderDecoderRow, PrefixRow
from train.data.rows.subset import Subset
from train.data.rows.tasks import Mixture, Task, TextTask
from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError

Architecture = Literal['encoder_decoder', 'decoder_only']
MakeRow = EncoderDecoderRow | PrefixRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTask(TextTask):
    """A task whose examples have inputs and targets.

    Attributes:
      architecture: 'encoder_decoder' gives the inputs to an encoder and the targets to a decoder.
        'decoder_only' puts the inputs of an example before its targets in one row.
      pack: whether a row may hold several examples, separated by segments.
      name: the name of the task in results.
      metrics: the metrics of decoded text; see `train.evaluators.text_metrics`.
      postprocess: turns decoded text into what the metrics compare: a function of
        (text, example=..., is_target=...). By default, metrics compare the text.
    """

    architecture: Architecture = 'encoder_decoder'
    pack: bool = False
    name: str = ''
    metrics: Sequence[Callable[..., Any]] = ()
    postprocess: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.architecture not in get_args(Architecture):
            raise ConfigError(
                f'{kind}.architecture is {self.architecture!r}: use {get_args(Architecture)}'
            )
        if not isinstance(self.pack, bool):
            raise ConfigError(f'{kind}.pack is {self.pack!r}: use True or False')
        if not isinstance(self.metrics, list | tuple) or not all(map(callable, self.metrics)):
            raise ConfigError(f'{kind}.metrics is {self.metrics!r}: it must be a list of functions')

    def make_row_of(self, inputs: int, targets: int, has_inputs: bool = True) -> MakeRow:
        if self.architecture == 'encoder_decoder':
            return EncoderDecoderRow(inputs, targets, self.pack)
        return PrefixRow(inputs + targets, has_inputs, self.pack)


def check_padding(tokenizer: Tokenizer) -> None:
    """Checks that rows can be padded with token 0, as T5's models expect."""
    if not tokenizer.pads_with_0:
        raise ConfigError(
            f'rows with inputs and targets are padded with token 0, but token 0 of '
            f'{type(tokenizer).__name__} stands for text: use ByT5Tokenizer, or a SentencePiece '
            'model'
        )


def adapt(
    task: Task,
    *,
    architecture: Architecture | None = None,
    pack: bool | None = None,
    cut: bool | None = None,
) -> Any:
    """Changes how inputs and targets become rows, in every part of a mixture.

    Tasks without inputs and targets stay as they are. None keeps what a task has.
    """
    given = {'architecture': architecture, 'pack': pack, 'cut': cut}

    def change(part: Any) -> Any:
        if not isinstance(part, PairTask):
            return part
        changes: dict[str, Any] = {
            k: v for k, v in given.items() if v is not None and hasattr(part, k)
        }
        return dataclasses.replace(part, **changes)

    return map_parts(change, task)


def map_parts(change: Callable[[Any], Any], task: Task) -> Any:
    """The task with every part of its mixtures changed."""
    if isinstance(task, Mixture):
        return dataclasses.replace(task, tasks=[map_parts(change, part) for part in task.tasks])
    if isinstance(task, Subset):
        return dataclasses.replace(task, task=map_parts(change, task.task))
    return change(task)
