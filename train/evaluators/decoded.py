"""Metrics of the text that a model predicts for held-out examples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from partitioning import TrainState
from train.data import FiniteBatches, Lengths, Task
from train.data.rows.packing import check_lengths
from train.data.rows.pair_tasks import adapt
from train.decoding import predict as predict_batch
from train.errors import ConfigError, check_counts
from train.evaluators.evaluator import EvaluatedRun, finite_batches
from train.evaluators.files import write_metrics, write_results
from train.evaluators.references import (
    Predict,
    Reference,
    iterate_outputs,
    open_examples,
    open_text,
    partition_prediction,
)
from train.evaluators.text_metrics import Metric
from train.processes.activity import calling_compiler
from train.reporting.reports import format_scores

LONGEST: Lengths = {'inputs': None, 'targets': None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedText:
    """Predicts the targets of held-out examples, and scores the decoded text.

    The results are written to `<model_dir>/inference_eval`: the scores of each evaluation as a line
    of `<task>-metrics.jsonl`, and the examples with their predictions in `<task>-<step>.jsonl`.

    Attributes:
      predict: predicts the targets of a batch. By default, it always takes the most likely token;
        `functools.partial(train.decoding.predict, decode_fn=...)` decodes otherwise. It is a
        function of (objective, params, batch, key, variables=..., end_token=...), which returns
        tokens [batch, length], or an object with such `tokens`.
      task: the task, by default the one that the run trains on. The tasks of a mixture are
        evaluated one by one.
      every: the number of steps between evaluations. 0 evaluates only at the end.
      metrics: the metrics, by default the metrics of each task.
      num_examples: the number of examples of each task. None evaluates all.
      batch_size: the number of rows in a batch, by default as in the training.
      sequence_length: the numbers of input and target tokens. By default, no text is cut.
      write_n_results: the number of examples that are written. None writes all, 0 none.
    """

    predict: Predict = predict_batch
    task: Task | None = None
    every: int = 0
    metrics: Sequence[Metric] | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    sequence_length: Lengths = dataclasses.field(default_factory=lambda: LONGEST)
    write_n_results: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.predict):
            raise ConfigError(f'DecodedText.predict is {self.predict!r}: it must be a function')
        for name in ('num_examples', 'batch_size'):
            if getattr(self, name) is not None:
                check_counts(**{f'DecodedText.{name}': getattr(self, name)})
        if self.write_n_results is not None:
            check_counts(minimum=0, **{'DecodedText.write_n_results': self.write_n_results})
        check_lengths('DecodedText.sequence_length', self.sequence_length)

    def change_task(self, task: Task) -> Task:
        """The task with one example per row."""
        return adapt(task, pack=False)

    def prepare(self, run: EvaluatedRun, name: str) -> PreparedDecodedText:
        """Opens the held-out examples of each task.

        Raises:
          ConfigError: if the task has no text, or if no task has metrics.
        """
        opened, tasks = open_text(run, name), list[_Examined]()
        with run.console.phase(f'opening the held-out examples of {name}'):
            for part in opened.parts:
                if metrics := part.metrics if self.metrics is None else self.metrics:
                    examples = open_examples(opened, part, slice(self.num_examples))
                    batches = finite_batches(run, examples.rows, self.batch_size)
                    tasks.append(_Examined(part.name, metrics, batches, examples.references()))
        if not tasks:
            raise ConfigError(
                f'the evaluator {name!r} has no metrics: set DecodedText.metrics, or the metrics '
                'of the task, such as [@bleu]'
            )
        return PreparedDecodedText(self.every, name, run, self, tasks)


class _Examined(NamedTuple):
    """One task: its metrics, its rows, and what the predictions are compared with."""

    name: str
    metrics: Sequence[Metric]
    batches: FiniteBatches
    references: list[Reference]


@dataclasses.dataclass(frozen=True)
class PreparedDecodedText:
    """The held-out examples of each task; see `DecodedText`."""

    every: int
    name: str
    owner: EvaluatedRun
    settings: DecodedText
    tasks: list[_Examined]

    @functools.cached_property
    def _predict(self) -> Any:
        """The function (params, variables, batch, key) -> tokens [batch, length], partitioned."""

        def predict(*given: Any, **options: Any) -> jax.Array:
            found = self.settings.predict(*given, **options)
            tokens: Any = getattr(found, 'tokens', found)
            return tokens if tokens.ndim == 2 else tokens[:, -1]

        partitioned = partition_prediction(self.owner, self.name, predict)

        def infer(*given: Any) -> Any:
            with calling_compiler():  # The first call with rows of another length compiles.
                return partitioned(*given)

        return infer

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        scores, owner = dict[str, float](), self.owner
        for name, metrics, batches, references in self.tasks:
            outputs = iterate_outputs(owner, self._predict, state, batches, len(references))
            tokens = [row for _, rows in outputs for row in rows]
            found = score(metrics, references, tokens)
            if jax.process_index() == 0:
                folder = owner.directory / 'inference_eval'
                write_metrics(folder, name, step, found)
                pairs = list(zip(references, tokens, strict=True))[: self.settings.write_n_results]
                if pairs:
                    write_results(folder, name, step, [r.result(t) for r, t in pairs])
            prefix = f'{name}/' if len(self.tasks) > 1 else ''
            scores |= {f'{prefix}{metric}': value for metric, value in found.items()}
        owner.console.scores(step, self.name, format_scores(scores))
        return scores


def score(
    metrics: Sequence[Metric], references: Sequence[Reference], tokens: Sequence[np.ndarray]
) -> dict[str, float]:
    """The scores of predicted tokens, by name.

    Args:
      metrics: the metrics. A metric with the attribute `reads_tokens` gets tokens, not text.
      tokens: int [length], the predicted tokens of each example.
    """
    pairs = list(zip(references, tokens, strict=True))
    by_tokens = [r.tokens for r in references], [r.cut(t) for r, t in pairs]
    by_text = [r.target for r in references], [r.predicted(t) for r, t in pairs]
    scores: dict[str, float] = {}
    for metric in metrics:
        given = by_tokens if getattr(metric, 'reads_tokens', False) else by_text
        for name, value in dict(metric(*given)).items():
            # seqio's metrics may return Scalar(value).
            scores[name] = float(getattr(value, 'value', value))
    return scores
