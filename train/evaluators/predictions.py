"""Files with the predictions of a model, or its scores of given targets, for every example."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from rich.table import Table

from partitioning import TrainState
from train.data import Lengths, OpenText, Task
from train.data.batches import abstract_batch
from train.data.rows.pair_tasks import adapt
from train.data.rows.pairs import Pairs
from train.decoding import check_can_decode, predict as predict_batch
from train.errors import ConfigError, check_counts
from train.evaluators.evaluator import (
    EvaluatedRun,
    compile_scoring,
    feeding,
    finite_batches,
    partition_scoring,
)
from train.evaluators.files import PartFiles
from train.evaluators.references import Mode, Reference, describe_function, references_of, to_line
from train.paths import as_folder
from train.processes.activity import wait_for_devices
from train.processes.together import agree_on
from train.reporting.reports import format_seconds

# (number of the first batch) -> the number of examples so far and the outputs of the next batch
_OutputsFrom = Callable[[int], Iterator[tuple[int, list[Any]]]]


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
    predict: Callable[..., Any] = predict_batch
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
        opened, objective = run.evaluated[name], run.config.objective
        if not isinstance(opened, OpenText):
            raise ConfigError(f'the evaluator {name!r} decodes text, but the task has no text')
        if self.mode != 'score':
            check_can_decode(objective)
        elif not hasattr(objective, 'score'):
            raise ConfigError(
                f"mode is 'score', but {type(objective).__name__} has no method score: use the "
                'objective EncoderDecoder or PrefixLanguageModel'
            )
        with run.console.phase(f'opening the examples of {name}'):
            tasks = [_open(opened, part, self) for part in opened.parts]
        names = [task.name for task in tasks]
        if len(set(names)) < len(names):
            raise ConfigError(
                f'the tasks {", ".join(names)} would write to the same file: give each a name'
            )
        return PreparedPredictionFiles(self.every, name, run, self, tasks)


@dataclasses.dataclass(frozen=True)
class _OpenPart:
    """The examples of one task: rows for the model, and their texts."""

    name: str
    rows: Sequence[Any]
    describe: Callable[[Sequence[int]], list[Reference]]
    content_hash: str


def _open(opened: OpenText, part: Any, settings: PredictionFiles) -> _OpenPart:
    rows = OpenText(opened.tokenizer, [part]).evaluation().rows
    rows = rows[settings.shard_index :: settings.num_shards]
    held_out = part.index.held_out
    pairs = held_out if isinstance(held_out, Pairs) else None

    def describe(numbers: Sequence[int]) -> list[Reference]:
        places = [settings.shard_index + n * settings.num_shards for n in numbers]
        own: Any = None if pairs is None else [pairs[place] for place in places]
        return references_of([rows[n] for n in numbers], own, part, opened.tokenizer)

    return _OpenPart(part.name.replace('/', '_'), rows, describe, part.index.content_hash)


@dataclasses.dataclass(frozen=True)
class PreparedPredictionFiles:
    """The examples of each task; see `PredictionFiles`."""

    every: int
    name: str
    owner: EvaluatedRun
    settings: PredictionFiles
    tasks: list[_OpenPart]

    @property
    def _batch_size(self) -> int:
        return self.settings.batch_size or self.owner.config.batch_size

    def _compile(self, task: _OpenPart) -> Any:
        """Compiles the function (params, variables, batch, key) -> outputs of each row."""
        run, settings = self.owner, self.settings
        objective: Any = run.config.objective
        end = run.evaluated[self.name].tokenizer.separator  # type: ignore[union-attr]

        def infer(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
            variables = variables or {}
            if settings.mode == 'score':
                return objective.score(params, batch, variables)
            options = {'variables': variables, 'end_token': end}
            return settings.predict(objective, params, batch, key, **options)

        batch = abstract_batch(task.rows[0], self._batch_size, run.config.partitioner)
        return compile_scoring(run, partition_scoring(run, infer, None), batch, run.key)

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        owner, settings = self.owner, self.settings
        folder = settings.output_dir or str(owner.directory / 'predictions' / str(step))
        table = Table('task', 'examples', 'time', 'examples / s', 'files', box=None)
        for column in table.columns[1:4]:
            column.justify = 'right'
        for task in self.tasks:
            shard = f'{settings.shard_index:05}-of-{settings.num_shards:05}'
            path = as_folder('output_dir', folder)
            files = PartFiles(
                path / f'{task.name}-{settings.mode}.{settings.extension}-{shard}',
                path / f'tmp-{task.name}-{settings.mode}-{shard}',
            )
            with owner.console.phase(f'compiling {settings.mode} for {task.name}'):
                infer = self._compile(task)
            started = time.perf_counter()
            outputs = functools.partial(self._outputs, infer, state, task)
            num_new = self._write_parts(outputs, step, task, files)
            seconds = time.perf_counter() - started
            written: Sequence[Any] = ()
            with owner.console.phase(f'writing {files.path.name}'):
                if jax.process_index() == 0:
                    written = files.finish(self._num_parts(task), settings.merge_parts)
            shown = [str(path) for path in written]
            shown = shown[:1] if len(shown) == 1 else [f'{files.folder} ({len(shown)} parts)']
            speed = f'{num_new / seconds:,.1f}'
            table.add_row(task.name, f'{num_new:,}', format_seconds(seconds), speed, shown[0])
        owner.console.heading(f'{settings.mode}, step {step}')
        owner.console.show(table)
        return {}

    def _num_parts(self, task: _OpenPart) -> int:
        return -(-len(task.rows) // (self._batch_size * self.settings.batches_per_part))

    def _write_parts(
        self, outputs_from: _OutputsFrom, step: int, task: _OpenPart, files: PartFiles
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
        outputs: list[Any] = []
        number, begin = first_part, first
        with console.counting(f'{mode} {task.name}', len(task.rows)) as show:
            for done, output in outputs_from(first_part * per_part):
                outputs.extend(output)
                show(done)
                if done - begin == per_part * self._batch_size or done == len(task.rows):
                    with console.phase('writing a part'):
                        if jax.process_index() == 0:
                            references = task.describe(range(begin, done))
                            pairs = zip(references, outputs, strict=True)
                            files.write(number, (to_line(mode, r, o) for r, o in pairs))
                    outputs, number, begin = [], number + 1, done
        return len(task.rows) - min(first, len(task.rows))

    def _outputs(
        self, infer: Any, state: TrainState, task: _OpenPart, first_batch: int
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yields the number of examples so far, and the outputs of each row of the next batch.

        The rows that fill up the last batch are dropped.
        """
        size, key = self._batch_size, self.owner.key
        batches = finite_batches(self.owner, task.rows, size)
        if first_batch >= len(batches):
            return
        with feeding(self.owner, batches, first_batch) as numbered:
            for number, batch in numbered:
                batch.pop('row_weights')
                given = (state.params, state.flax_mutables, batch, jax.random.fold_in(key, number))
                output = infer(*given)
                wait_for_devices(output)
                done = min((number + 1) * size, len(task.rows))
                arrays = jax.tree.map(np.asarray, output)
                count = done - number * size
                yield done, [jax.tree.map(lambda x, i=i: x[i], arrays) for i in range(count)]

    def _describe(self, step: int, task: _OpenPart) -> Mapping[str, Any]:
        """What determines the parts of a file."""
        settings = self.settings
        return {
            'step': step,
            'mode': settings.mode,
            'predict': describe_function(settings.predict),
            'examples': len(task.rows),
            'content_hash': task.content_hash,
            'shapes': {name: list(x.shape) for name, x in task.rows[0].items()},
            'batch_size': self._batch_size,
            'batches_per_part': settings.batches_per_part,
            'key': jax.random.key_data(self.owner.key).tolist(),
        }
