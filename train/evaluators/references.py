"""What predictions are compared with: the inputs and targets of held-out examples, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from train.data.rows.open_task import Part
from train.data.rows.packing import Row
from train.data.rows.pairs import PADDING, Pairs
from train.data.text.tokenizers import Tokenizer

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
