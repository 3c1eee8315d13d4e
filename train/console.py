"""The output of a run: tables and progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from partitioning.plan import Audit, PlanRow
from partitioning.rules import as_tuple
from train.data import EvaluationSet, OpenTask


class RunConsole:
    """Prints the progress of a run. Only process 0 prints.

    Args:
      console: where to print, by default standard output.
    """

    def __init__(self, console: Console | None = None):
        quiet = jax.process_index() != 0
        self._console = console or Console(highlight=False, quiet=quiet)
        if not self._console.is_terminal:
            self._console.width = 160  # In a file or a pipe, the rows of a table may be long.
        self._progress: Progress | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the output goes to a terminal."""
        return self._console.is_terminal

    def say(self, message: str, style: str | None = None) -> None:
        """Prints one line without interpreting its markup. Only a terminal wraps it."""
        text = Text(message, style=style or '')
        self._console.print(text, soft_wrap=not self.is_terminal)

    def heading(self, title: str) -> None:
        """Prints a heading."""
        if self.is_terminal:
            self._console.rule(title, align='left', style='dim')
        else:
            self.say(f'-- {title}')

    def mesh(self, mesh: Mesh) -> None:
        """Prints the devices and the axes of the mesh."""
        kinds = sorted({d.device_kind.replace('cpu', 'CPU') for d in mesh.devices.flat})
        processes = len({d.process_index for d in mesh.devices.flat})
        table = Table(title=None, box=None, pad_edge=False, header_style='bold')
        for column in ('mesh axis', 'size'):
            table.add_column(column, justify='right' if column == 'size' else 'left')
        for axis, size in mesh.shape.items():
            table.add_row(str(axis), str(size))
        self.heading(
            f'{mesh.size:,} {" and ".join(kinds)} device{"s" if mesh.size > 1 else ""}, '
            f'{processes:,} process{"es" if processes > 1 else ""}'
        )
        self._console.print(table)

    @contextlib.contextmanager
    def tokenizing(self) -> Iterator[Callable[[str, int, int], None]]:
        """Shows a progress bar for each token index that is built, and a line at the end.

        Yields:
          The function to call with the progress: (name of the source, bytes done, bytes in total).
        """
        started, names = time.perf_counter(), dict[str, TaskID]()
        progress = Progress(
            TextColumn('tokenizing {task.description}'),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn('left'),
            console=self._console,
            transient=True,
            disable=not self.is_terminal,
        )

        def report(name: str, done: int, total: int) -> None:
            if name not in names:
                names[name] = progress.add_task(name, total=total)
            progress.update(names[name], completed=done, total=total)

        with progress:
            yield report
        if names:
            self.say(f'tokenized {", ".join(names)} in {time.perf_counter() - started:.1f} s')

    def data(self, task: OpenTask, evaluations: Mapping[str, EvaluationSet], epochs: float) -> None:
        """Prints how much text there is, and how much of it the run uses.

        Args:
          task: the training data.
          evaluations: the held-out data, by the name of its task.
          epochs: how often the run reads every training row.
        """
        for part in task.parts:
            training, held_out = part.index.training, part.index.held_out
            share = '' if len(task.parts) == 1 else f'{part.name} ({part.weight:.1%} of the rows): '
            self.say(
                f'{share}training on {_documents(training.num_documents)} '
                f'({format_bytes(training.num_bytes)}), {_documents(held_out.num_documents)} held '
                'out'
            )
        evaluated = ', '.join(
            f'{_documents(e.num_documents)}{f" of {name}" if name else ""} ({len(e.rows):,} rows)'
            for name, e in evaluations.items()
        )
        count = f'{epochs:.2g}' if epochs < 1 else f'{epochs:,.1f}'
        self.say(
            f'{count} epochs (1 epoch is {task.rows_per_epoch:,} rows); evaluating {evaluated}'
        )

    def parameters(self, rows: Sequence[PlanRow], limit: int = 10) -> None:
        """Prints the largest parameters and their layouts."""
        largest = sorted(rows, key=lambda row: -row.bytes_total)[:limit]
        count = sum(math.prod(row.shape) for row in rows)
        total = format_bytes(sum(row.bytes_total for row in rows))
        per_device = format_bytes(sum(row.bytes_per_device for row in rows))
        self.heading(
            f'{count / 1e6:,.2f} M parameters in {len(rows)} arrays, {total} ({per_device} per '
            f'device); the {len(largest)} largest:'
        )
        table = Table(box=None, pad_edge=False, header_style='bold')
        for name in ('parameter', 'shape', 'logical axis:mesh axis', 'shard'):
            table.add_column(name, overflow='fold')
        table.add_column('per device', justify='right')
        for row in largest:
            table.add_row(
                row.path.removeprefix('params/'),
                _sizes(row.shape),
                _axes(row),
                _sizes(row.shard_shape),
                format_bytes(row.bytes_per_device),
            )
        self._console.print(table)

    def audit(self, audit: Audit) -> None:
        """Prints the bytes of the state per device, and how far they exceed an even split."""
        roles = ', '.join(f'{role} {format_bytes(size)}' for role, size in audit.by_role.items())
        above = audit.replicated_bytes_per_device
        even = audit.bytes_per_device - above
        split = f'{above / max(even, 1):,.1%} above an even split' if above else 'split evenly'
        self.say(f'state: {format_bytes(audit.bytes_per_device)} per device ({roles}), {split}')
        if audit.replicated:
            worst = audit.replicated[0]
            extra = format_bytes(worst.bytes_per_device)
            self.say(f'most replicated: {worst.row.path}, {extra} per device ({worst.reason})')
        for cost in audit.policies[:3]:
            extra = format_bytes(cost.bytes_per_device)
            self.say(f'policy: {cost.row.path} costs {extra} per device: {cost.reason}')

    @contextlib.contextmanager
    def training(self, first_step: int, total_steps: int) -> Iterator[None]:
        """Shows a progress bar during the training loop."""
        if first_step >= total_steps:
            yield
            return
        self.heading(f'training from step {first_step} to {total_steps}')
        if not self.is_terminal:
            yield
            return
        self._progress = Progress(
            TextColumn('step'),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn('{task.fields[figures]}'),
            TimeRemainingColumn(),
            TextColumn('left'),
            console=self._console,
        )
        with self._progress:
            self._progress.add_task('train', total=total_steps, completed=first_step, figures='')
            yield
        self._progress = None

    def step(self, step: int, total_steps: int, scalars: Mapping[str, float]) -> None:
        """Prints the loss and the throughput after a step."""
        loss, rate = scalars['train/loss'], scalars['train/tokens_per_second']
        figures = f'loss {loss:.3f}  {rate:,.0f} tokens/s'
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, figures=figures)
        else:
            self.say(f'step {step}/{total_steps}  {figures}')

    def advance(self, step: int) -> None:
        """Moves the progress bar after a step whose metrics are not printed."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def evaluation(
        self,
        step: int,
        name: str,
        scores: Mapping[str, float],
        baselines: Mapping[str, float],
    ) -> None:
        """Prints the held-out score of a task, with the baselines on the same bytes.

        Args:
          step: the step of the parameters.
          name: the name of the task, or ''.
          scores: its scores, as `mean_scores` returns them.
          baselines: bits per byte of simple models, by name.
        """
        score = f'held-out loss {scores["loss"]:.3f}'
        if 'bits_per_byte' in scores:
            others = ', '.join(f'{model} {value:.3f}' for model, value in baselines.items())
            score = f'held-out bits per byte {scores["bits_per_byte"]:.3f} (baselines: {others})'
        self.say(f'step {step}: {name + ": " if name else ""}{score}', style='bold')

    def files(self, files: Mapping[str, Path]) -> None:
        """Prints the paths of the run's files that exist.

        Args:
          files: the paths, by what they contain.
        """
        self.heading('files')
        width = max(map(len, files))
        for content, path in files.items():
            if path.exists():
                self.say(f'{content:<{width}}  {path}')

    def sample(self, prompt: str, continuation: str) -> None:
        """Prints a prompt and the model's continuation of it."""
        self.heading('sample: the prompt and its continuation')
        self._console.print(Text.assemble((_printable(prompt), 'bold'), _printable(continuation)))


def format_bytes(count: float) -> str:
    """Formats a number of bytes for people: '768 bytes', '98.3 kB', '3.6 MB' or '2.30 GiB'."""
    if count < 1000:
        return f'{count:.0f} byte{"" if count == 1 else "s"}'
    if count >= 2**30:
        return f'{count / 2**30:,.2f} GiB'
    return f'{count / 1e6:,.1f} MB' if count >= 1e6 else f'{count / 1e3:,.1f} kB'


def _printable(text: str) -> str:
    """Replaces control characters, which could change the state of the terminal."""
    return ''.join(c if c.isprintable() or c == '\n' else '\N{REPLACEMENT CHARACTER}' for c in text)


def _documents(count: int) -> str:
    return f'{count:,} document{"" if count == 1 else "s"}'


def _sizes(shape: Sequence[int]) -> str:
    return 'x'.join(map(str, shape))


def _axes(row: PlanRow) -> str:
    """Returns each logical axis with the mesh axes that shard it: `embed:data heads:model kv`."""
    return ' '.join(
        ':'.join(part for part in (name, '+'.join(as_tuple(dimension.mesh_axes))) if part) or '-'
        for dimension in row.dimensions
        for name in [dimension.name if isinstance(dimension.name, str) else '']
    )


class Throughput:
    """Measures tokens per second, and the fraction of time spent waiting for input.

    Args:
      tokens_per_step: the number of tokens in a global batch.
      step: the step at which the measurement starts.
    """

    def __init__(self, tokens_per_step: int, step: int):
        self._tokens_per_step = tokens_per_step
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0

    def read(self, step: int, waited: float) -> dict[str, float]:
        """Returns the rates since the last call, as metrics.

        Args:
          step: the newest finished step.
          waited: the time that all steps have waited for their batches, in seconds.
        """
        now = time.perf_counter()
        elapsed = max(now - self._time, 1e-9)
        seconds = elapsed / max(step - self._step, 1)
        input_wait = (waited - self._waited) / elapsed
        self._step, self._time, self._waited = step, now, waited
        return {
            'train/tokens_per_second': self._tokens_per_step / seconds,
            'train/seconds_per_step': seconds,
            'train/input_wait': input_wait,
        }

    def skip(self, seconds: float) -> None:
        """Excludes time that was not spent on training, in seconds."""
        self._time += seconds
