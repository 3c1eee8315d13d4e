"""Files with the predictions of a model, or its scores of given targets, for every example."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
from rich.table import Table

from partitioning import TrainState
from train.data import Lengths, Task
from train.data.feed import abstract_batch
from train.data.rows.pair_tasks import adapt
from train.decoding import check_can_decode, predict as predict_batch
from train.errors import ConfigError, check_counts
from train.evaluators.evaluator import EvaluatedRun, compile_scoring, finite_batches
from train.evaluators.files import PartFiles
from train.evaluators.references import (
    Mode,
    Predict,
    TaskExamples,
    describe_function,
    iterate_outputs,
    open_examples,
    open_text,
    partition_prediction,
    to_line,
)
from train.paths import as_folder
from train.processes.together import agree_on
from train.reporting.reports import format_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionFiles:
    """Writes the predictions for held-out examples, one line of JSON per example.

    A line has the texts of the example as `inputs`, and by mode `prediction`, or `prediction` and
    `aux` (the scores of the decodes), or `score`, the log-probability of the targets. The file is
    `<output_dir>/<task>-<mode>.jsonl-<shard>-of-<shards>`. It is written in parts: a command that
    was stopped resumes after its last finished part.

    Attributes:
      mode: 'predict', 'predict_with_aux' or 'score'.
      predict: predicts the targets of a batch. By default, it always takes the most likely token;
        `functools.partial(train.decoding.predict, decode_fn=...)` decodes otherwise. If it returns
        all decodes, `prediction` is a list, the best one last.
      task: the task, by default the one that the run trains on. Each task of a mixture has a file.
      every: the number of steps between predictions. 0 predicts only at the end.
      batch_size: the number of rows in a batch, by default as in the training.
      sequence_length: the numbers of input and target tokens. By default, as in the run.
      output_dir: the folder of the files, by default `<model_dir>/predictions/<step>`. It must be
        on storage that all hosts share.
      shard_index: which share of the examples is predicted: those with the numbers `shard_index`,
        `shard_index` + `num_shards`, and so on.
      num_shards: the number of shares.
      batches_per_part: the number of batches in a part.
      merge_parts: whether the parts become one file at the end.
      extension: the extension in the name of the file.
    """

    mode: Mode = 'predict'
    predict: Predict = predict_batch
    task: Task | None = None
    every: int = 0
    batch_size: int | None = None
    sequence_length: Lengths = None
    output_dir: str | None = None
    shard_index: int = 0
    num_shards: int = 1
    batches_per_part: int = 100
    merge_parts: bool = True
    extension: str = 'jsonl'

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f'mode is {self.mode!r}: use {get_args(Mode)}')
        check_counts(num_shards=self.num_shards, batches_per_part=self.batches_per_part)
        check_counts(0, shard_index=self.shard_index)
        if self.shard_index >= self.num_shards:
            raise ConfigError(
                f'shard_index is {self.shard_index} of {self.num_shards} shards: use a number from '
                f'0 to {self.num_shards - 1}'
            )
        if self.batch_size is not None:
            check_counts(batch_size=self.batch_size)

    def change_task(self, task: Task) -> Task:
        """The task with one example per row."""
        return adapt(task, pack=False)

    def prepare(self, run: EvaluatedRun, name: str) -> PreparedPredictionFiles:
        """Opens the examples of each task.

        Raises:
          ConfigError: if the task has no text, or if the objective cannot predict or score.
        """
        opened, objective = open_text(run, name), run.config.objective
        if self.mode != 'score':
            check_can_decode(objective)
        elif not hasattr(objective, 'score'):
            raise ConfigError(
                f"mode is 'score', but {type(objective).__name__} has no method score: use the "
                'objective EncoderDecoder or PrefixLanguageModel'
            )
        with run.console.phase(f'opening the examples of {name}'):
            chosen = slice(self.shard_index, None, self.num_shards)
            tasks = [open_examples(opened, part, chosen) for part in opened.parts]
        names = [_file_name(task) for task in tasks]
        if len(set(names)) < len(names):
            raise ConfigError(
                f'the tasks {", ".join(names)} would write to the same file: give each a name'
            )
        return PreparedPredictionFiles(self.every, name, run, self, tasks)


def _file_name(task: TaskExamples) -> str:
    return task.part.name.replace('/', '_')


@dataclasses.dataclass(frozen=True)
class PreparedPredictionFiles:
    """The examples of each task; see `PredictionFiles`."""

    every: int
    name: str
    owner: EvaluatedRun
    settings: PredictionFiles
    tasks: list[TaskExamples]

    @property
    def _batch_size(self) -> int:
        return self.settings.batch_size or self.owner.config.batch_size

    def _compile(self, task: TaskExamples) -> Any:
        """Compiles the function (params, variables, batch, key) -> outputs of each row."""
        run, settings = self.owner, self.settings

        def predict(objective: Any, params: Any, batch: Any, *given: Any, **options: Any) -> Any:
            if settings.mode == 'score':
                return objective.score(params, batch, options['variables'])
            return settings.predict(objective, params, batch, *given, **options)

        partitioned = partition_prediction(run, self.name, predict)
        batch = abstract_batch(task.rows[0], self._batch_size, run.config.partitioner)
        return compile_scoring(run, partitioned, batch, run.key)

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        owner, settings = self.owner, self.settings
        folder = settings.output_dir or str(owner.directory / 'predictions' / str(step))
        table = Table('task', 'examples', 'time', 'examples / s', 'files', box=None)
        for column in table.columns[1:4]:
            column.justify = 'right'
        for task in self.tasks:
            name = _file_name(task)
            shard = f'{settings.shard_index:05}-of-{settings.num_shards:05}'
            path = as_folder('output_dir', folder)
            files = PartFiles(
                path / f'{name}-{settings.mode}.{settings.extension}-{shard}',
                path / f'tmp-{name}-{settings.mode}-{shard}',
            )
            with owner.console.phase(f'compiling {settings.mode} for {name}'):
                infer = self._compile(task)
            started = time.perf_counter()
            num_new = self._write_parts(infer, state, step, task, files)
            seconds = time.perf_counter() - started
            written: Sequence[Any] = ()
            with owner.console.phase(f'writing {files.path.name}'):
                if jax.process_index() == 0:
                    rows_per_part = self._batch_size * settings.batches_per_part
                    num_parts = -(-len(task.rows) // rows_per_part)
                    written = files.finish(num_parts, settings.merge_parts)
            shown = [str(path) for path in written]
            shown = shown[:1] if len(shown) == 1 else [f'{files.folder} ({len(shown)} parts)']
            speed = f'{num_new / seconds:,.1f}'
            table.add_row(name, f'{num_new:,}', format_seconds(seconds), speed, shown[0])
        owner.console.heading(f'{settings.mode}, step {step}')
        owner.console.show(table)
        return {}

    def _write_parts(
        self, infer: Any, state: TrainState, step: int, task: TaskExamples, files: PartFiles
    ) -> int:
        """Writes the parts that are missing, and returns the number of their examples."""
        console, per_part = self.owner.console, self.settings.batches_per_part
        mode = self.settings.mode
        with console.phase(f'looking for parts of {files.path.name}'):
            mine = files.begin(self._describe(step, task)) if jax.process_index() == 0 else 0
        first_part = int(agree_on(mine))
        first = first_part * per_part * self._batch_size
        if first_part:
            console.say(f'{files.path.name}: resumes at example {first:,} of {len(task.rows):,}')
        batches = finite_batches(self.owner, task.rows, self._batch_size)
        found = iterate_outputs(
            self.owner, infer, state, batches, len(task.rows), first_part * per_part
        )
        outputs: list[Any] = []
        number, begin = first_part, first
        with console.counting(f'{mode} {_file_name(task)}', len(task.rows)) as show:
            for done, output in found:
                outputs.extend(output)
                show(done)
                if done - begin == per_part * self._batch_size or done == len(task.rows):
                    with console.phase('writing a part'):
                        if jax.process_index() == 0:
                            references = task.references(begin, done)
                            pairs = zip(references, outputs, strict=True)
                            files.write(number, (to_line(mode, r, o) for r, o in pairs))
                    outputs, number, begin = [], number + 1, done
        return len(task.rows) - min(first, len(task.rows))

    def _describe(self, step: int, task: TaskExamples) -> Mapping[str, Any]:
        """What determines the parts of a file."""
        settings = self.settings
        return {
            'step': step,
            'mode': settings.mode,
            'predict': describe_function(settings.predict),
            'examples': len(task.rows),
            'content_hash': task.part.index.content_hash,
            'shapes': {name: list(x.shape) for name, x in task.rows[0].items()},
            'batch_size': self._batch_size,
            'batches_per_part': settings.batches_per_part,
            'key': jax.random.key_data(self.owner.key).tolist(),
        }
