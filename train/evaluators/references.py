"""Held-out examples: their predictions, and their texts to compare these with."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from partitioning import TrainState
from train.data import FiniteBatches, OpenText
from train.data.rows.open_task import Part
from train.data.rows.packing import Row
from train.data.rows.pairs import PADDING, Pairs
from train.data.text.tokenizers import Tokenizer
from train.decoding import Predictions
from train.errors import ConfigError
from train.evaluators.evaluator import EvaluatedRun, feeding, partition_scoring
from train.machine.devices import must_wait_for_steps
from train.processes.activity import wait_for_devices

Postprocess = Callable[..., Any]
# (objective, params, batch, key, variables=..., end_token=...) -> tokens [batch, length]
Predict = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Reference:
    """An example that a prediction is compared with.

    Attributes:
      tokens: int [tokens], its targets, without the end token and padding.
      tokenizer: decodes predictions.
      postprocess: a function of (text, example=..., is_target=...) that returns what metrics
        compare; None compares the text itself.
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
        """The example and its prediction, as seqio's JSONLogger writes them.

        'output' is the predicted text before it is postprocessed, 'prediction' after it.
        """
        return {
            'input': self.texts,
            'target': self.target,
            'output': decode_text(tokens, self.tokenizer),
            'prediction': self.predicted(tokens),
        }

    @property
    def texts(self) -> dict[str, str]:
        """Its inputs and targets, by seqio's names."""
        return {'inputs_pretokenized': self.inputs, 'targets_pretokenized': self.targets}

    def _postprocessed(self, text: str, is_target: bool) -> Any:
        if self.postprocess is None:
            return text
        return self.postprocess(text, example=self.texts, is_target=is_target)


@dataclasses.dataclass(frozen=True)
class TaskExamples:
    """Held-out examples of one task, whose rows hold one example each.

    `numbers` has the place of each among all examples that are held out.
    """

    part: Part
    rows: Sequence[Row]
    numbers: range
    tokenizer: Tokenizer

    def references(self, first: int = 0, last: int | None = None) -> list[Reference]:
        """The examples from number `first` up to, but without, number `last`, as text."""
        held_out, tokenizer, found = self.part.index.held_out, self.tokenizer, list[Reference]()
        for i in range(len(self.rows))[first:last]:
            # If the task has pairs, they are the examples before they were cut to rows.
            is_cut = not isinstance(held_out, Pairs)
            inputs, targets = _pair_of(self.rows[i]) if is_cut else held_out[self.numbers[i]]
            found.append(
                Reference(
                    cut_at_end(targets, tokenizer.separator),
                    decode_text(inputs, self.part.inputs_tokenizer or tokenizer),
                    decode_text(targets, tokenizer),
                    tokenizer,
                    self.part.postprocess,
                )
            )
        return found


def open_text(run: EvaluatedRun, name: str) -> OpenText:
    """The opened task of an evaluator. Raises a ConfigError if it has no text."""
    opened = run.evaluated[name]
    if not isinstance(opened, OpenText):
        raise ConfigError(f'the evaluator {name!r} decodes text, but the task has no text')
    return opened


def open_examples(opened: OpenText, part: Part, chosen: slice) -> TaskExamples:
    """Opens some of the held-out examples of a task, by their numbers."""
    rows = OpenText(opened.tokenizer, [part]).evaluation().rows
    return TaskExamples(part, rows[chosen], range(len(rows))[chosen], opened.tokenizer)


def partition_prediction(run: EvaluatedRun, name: str, predict: Predict) -> Any:
    """Partitions the prediction of a batch: (params, variables, batch, key) -> what it returns."""
    end = open_text(run, name).tokenizer.separator

    def infer(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
        options = {'variables': variables or {}, 'end_token': end}
        return predict(run.config.objective, params, batch, key, **options)

    return partition_scoring(run, infer, None)


def iterate_outputs(
    run: EvaluatedRun,
    infer: Any,
    state: TrainState,
    batches: FiniteBatches,
    num_rows: int,
    first: int = 0,
) -> Iterator[tuple[int, list[Any]]]:
    """Yields the number of rows so far, and the outputs of each row of the next batch.

    The rows that fill up the last batch are dropped. The devices already compute the next batch
    while the outputs of a batch are used, unless a step must end before the next one.

    Args:
      infer: the function (params, variables, batch, key) -> outputs of the rows of a batch.
    """
    if first >= len(batches):
        return
    size = batches.batch_size

    def read(number: int, output: Any) -> tuple[int, list[Any]]:
        wait_for_devices(output)
        done = min((number + 1) * size, num_rows)
        arrays, count = jax.tree.map(np.asarray, output), done - number * size
        return done, [jax.tree.map(lambda x, i=i: x[i], arrays) for i in range(count)]

    begun = list[tuple[int, Any]]()
    with feeding(run, batches, first) as numbered:
        for number, batch in numbered:
            batch.pop('row_weights')
            given = (state.params, state.flax_mutables, batch, jax.random.fold_in(run.key, number))
            begun.append((number, infer(*given)))
            if must_wait_for_steps() or len(begun) > 1:
                yield read(*begun.pop(0))
    for number, output in begun:
        yield read(number, output)


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
      output: its score; or its predicted tokens, or `Predictions` of one row.
    """
    line: dict[str, Any] = {'inputs': reference.texts}
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
