"""Metrics of the text that a model predicts for held-out examples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from partitioning import TrainState
from train.data import FiniteBatches, Lengths, OpenText, Task
from train.data.rows.lengths import check_lengths
from train.data.rows.pair_tasks import adapt
from train.data.rows.pairs import Pairs
from train.decoding import predict as predict_batch
from train.errors import ConfigError, check_counts
from train.evaluators.evaluator import (
    EvaluatedRun,
    feeding,
    finite_batches,
    partition_scoring,
)
from train.evaluators.files import write_metrics, write_results
from train.evaluators.references import Reference, references_of
from train.evaluators.text_metrics import Metric
from train.machine.devices import must_wait_for_steps
from train.processes.activity import calling_compiler, wait_for_devices
from train.reporting.reports import format_scores

# (objective, params, batch, key, variables=..., end_token=...) -> tokens [batch, length]
Predict = Callable[..., Any]
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
        opened = run.evaluated[name]
        if not isinstance(opened, OpenText):
            raise ConfigError(f'the evaluator {name!r} decodes text, but the task has no text')
        examined = []
        with run.console.phase(f'opening the held-out examples of {name}'):
            for part in opened.parts:
                metrics = tuple(part.metrics if self.metrics is None else self.metrics)
                if metrics:
                    rows = OpenText(opened.tokenizer, [part]).evaluation().rows
                    rows = rows[: self.num_examples or len(rows)]
                    pairs = part.index.held_out if isinstance(part.index.held_out, Pairs) else None
                    references = references_of(rows, pairs, part, opened.tokenizer)
                    batches = finite_batches(run, rows, self.batch_size)
                    examined.append(_Examined(part.name, metrics, batches, references))
        if not examined:
            raise ConfigError(
                f'the evaluator {name!r} has no metrics: set DecodedText.metrics, or the metrics '
                'of the task, such as [@bleu]'
            )
        return PreparedDecodedText(self.every, name, run, self, examined)


@dataclasses.dataclass(frozen=True)
class _Examined:
    """One task: its metrics, its rows, and what the predictions are compared with."""

    name: str
    metrics: tuple[Metric, ...]
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
        run, settings = self.owner, self.settings
        end = run.evaluated[self.name].tokenizer.separator  # type: ignore[union-attr]

        def predict(params: Any, variables: Any, batch: Any, key: jax.Array) -> jax.Array:
            found = settings.predict(
                run.config.objective,
                params,
                batch,
                key,
                variables=variables or {},
                end_token=end,
            )
            tokens: Any = getattr(found, 'tokens', found)
            return tokens if tokens.ndim == 2 else tokens[:, -1]

        return partition_scoring(run, predict, None)

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        scores: dict[str, float] = {}
        for task in self.tasks:
            tokens = self._decode(state, task)
            found = score(task.metrics, task.references, tokens)
            self._write(task, found, tokens, step)
            prefix = f'{task.name}/' if len(self.tasks) > 1 else ''
            scores |= {f'{prefix}{name}': value for name, value in found.items()}
        self.owner.console.scores(step, self.name, format_scores(scores))
        return scores

    def _decode(self, state: TrainState, task: _Examined) -> list[np.ndarray]:
        """The predicted tokens of each example, without the rows that fill up the last batch."""
        found, key = list[Any](), self.owner.key
        with feeding(self.owner, task.batches) as numbered:
            for number, batch in numbered:
                given = (state.params, state.flax_mutables, batch, jax.random.fold_in(key, number))
                with calling_compiler():
                    found.append(self._predict(*given))
                if must_wait_for_steps():
                    wait_for_devices(found[-1])
        wait_for_devices(found)
        rows = [row for tokens in found for row in np.asarray(tokens)]
        return rows[: len(task.references)]

    def _write(
        self, task: _Examined, scores: Mapping[str, float], tokens: list[np.ndarray], step: int
    ) -> None:
        if jax.process_index() != 0:
            return
        folder = self.owner.directory / 'inference_eval'
        write_metrics(folder, task.name, step, scores)
        count = self.settings.write_n_results
        if count != 0:
            pairs = list(zip(task.references, tokens, strict=True))[:count]
            write_results(folder, task.name, step, [r.result(t) for r, t in pairs])


def score(
    metrics: Sequence[Metric], references: Sequence[Reference], tokens: Sequence[np.ndarray]
) -> dict[str, float]:
    """Computes metrics of predicted tokens.

    Args:
      metrics: the metrics. A metric with the attribute `reads_tokens` gets tokens, not text.
      references: the examples.
      tokens: int [length], the predicted tokens of each example.

    Returns:
      The scores by name.
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
