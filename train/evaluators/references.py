"""Held-out examples as text, to compare predictions with and to write next to them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from train.data.rows.open_task import Part
from train.data.rows.packing import Row
from train.data.rows.pairs import PADDING, Pairs
from train.data.text.tokenizers import Tokenizer
from train.decoding import Predictions

Postprocess = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Reference:
    """An example that a prediction is compared with.

    Attributes:
      tokens: int [tokens], its targets, without the end token and padding.
      inputs: its inputs, as text.
      targets: its targets, as text.
      tokenizer: decodes predictions.
      postprocess: turns a text into what metrics compare, or None to compare the text: a function
        of (text, example=..., is_target=...).
    """

    tokens: np.ndarray
    inputs: str
    targets: str
    tokenizer: Tokenizer
    postprocess: Postprocess | None = None

    @property
    def target(self) -> Any:
        """The target as metrics compare it."""
        return self._postprocessed(self.targets, is_target=True)

    def predicted(self, tokens: np.ndarray) -> Any:
        """Predicted tokens as metrics compare them."""
        return self._postprocessed(decode_text(tokens, self.tokenizer), is_target=False)

    def cut(self, tokens: np.ndarray) -> np.ndarray:
        """Predicted tokens up to the end token, without padding."""
        return cut_at_end(tokens, self.tokenizer.separator)

    def result(self, tokens: np.ndarray) -> dict[str, Any]:
        """The example and its prediction, as seqio's JSONLogger writes them."""
        texts = {'inputs_pretokenized': self.inputs, 'targets_pretokenized': self.targets}
        return {'input': texts, 'target': self.target, 'prediction': self.predicted(tokens)}

    def _postprocessed(self, text: str, is_target: bool) -> Any:
        if self.postprocess is None:
            return text
        example = {'inputs_pretokenized': self.inputs, 'targets_pretokenized': self.targets}
        return self.postprocess(text, example=example, is_target=is_target)


def references_of(
    rows: Sequence[Row], pairs: Pairs | None, part: Part, tokenizer: Tokenizer
) -> list[Reference]:
    """The examples of rows that hold one example each.

    Args:
      rows: the rows.
      pairs: the examples before they were cut to rows. None takes them from the rows.
      part: the part of the task that the rows belong to.
      tokenizer: decodes the targets.
    """
    references = []
    for number in range(len(rows)):
        inputs, targets = _pair_of(rows[number]) if pairs is None else pairs[number]
        references.append(
            Reference(
                cut_at_end(targets, tokenizer.separator),
                decode_text(inputs, part.inputs_tokenizer or tokenizer),
                decode_text(targets, tokenizer),
                tokenizer,
                part.postprocess,
            )
        )
    return references


def _pair_of(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of a row: an encoder's, or a decoder's with a prefix."""
    targets, weights = row['decoder_target_tokens'], row['decoder_loss_weights'] > 0
    if 'encoder_input_tokens' in row:
        return row['encoder_input_tokens'], targets[weights]
    return targets[~weights], targets[weights]


def cut_at_end(tokens: np.ndarray, end: int) -> np.ndarray:
    """The tokens before the first end token, without padding."""
    ends = np.flatnonzero(tokens == end)
    tokens = tokens[: ends[0]] if len(ends) else tokens
    return tokens[tokens != PADDING]


def decode_text(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of tokens up to the first end token."""
    return tokenizer.decode(cut_at_end(tokens, tokenizer.separator)).decode(errors='replace')


Mode = Literal['predict', 'predict_with_aux', 'score']


def to_line(mode: Mode, reference: Reference, output: Any) -> str:
    """Returns the line of JSON of one example.

    Args:
      mode: what the line has in addition to the texts of the example.
      reference: the example.
      output: its score; or its predicted tokens, or `Predictions` of one row.
    """
    texts = {'inputs_pretokenized': reference.inputs, 'targets_pretokenized': reference.targets}
    line: dict[str, Any] = {'inputs': texts}
    if mode == 'score':
        return json.dumps(line | {'score': float(output)}, ensure_ascii=False)
    tokens, scores = output if isinstance(output, Predictions) else (output, None)
    decodes = [decode_text(row, reference.tokenizer) for row in np.atleast_2d(tokens)]
    line['prediction'] = decodes if np.ndim(tokens) == 2 else decodes[0]
    if mode == 'predict_with_aux':
        line['aux'] = {} if scores is None else {'scores': np.asarray(scores).tolist()}
    return json.dumps(line, ensure_ascii=False)


def describe_function(function: Any) -> Any:
    """Returns a function and the settings of `functools.partial`, as JSON."""
    if isinstance(function, functools.partial):
        settings = {k: describe_function(v) for k, v in sorted(function.keywords.items())}
        return {'function': describe_function(function.func), **settings}
    return getattr(function, '__qualname__', None) or repr(function)
