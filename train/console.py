"""What a run says: tables, progress bars and results on a terminal, plain lines elsewhere."""

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

from partitioning.plan.array_layouts import ArrayLayout
from partitioning.plan.audit import Audit
from partitioning.rules import as_tuple
from train.data import EvaluationSet, OpenTask


class RunConsole:
    """Prints a run's progress; silent on every process but the first."""

    def __init__(self, console: Console | None = None):
        quiet = jax.process_index() != 0
        self._console = console or Console(highlight=False, quiet=quiet)
        if not self._console.is_terminal:
            self._console.width = 160  # no terminal to fit into: rows stay whole
        self._progress: Progress | None = None

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def say(self, message: str, style: str | None = None) -> None:
        """One line, as it is."""
        self._console.print(Text(message, style=style or ''))

    def heading(self, title: str) -> None:
        if self.is_terminal:
            self._console.rule(title, align='left', style='dim')
        else:
            self.say(f'-- {title}')

    def mesh(self, mesh: Mesh) -> None:
        """The axes of the mesh and the devices they run over."""
        kinds = sorted({d.device_kind for d in mesh.devices.flat})
        processes = len({d.process_index for d in mesh.devices.flat})
        table = Table(title=None, box=None, pad_edge=False, header_style='bold')
        for column in ('mesh axis', 'size'):
            table.add_column(column, justify='right' if column == 'size' else 'left')
        for axis, size in mesh.shape.items():
            table.add_row(str(axis), str(size))
        self.heading(
            f'{mesh.size} devices ({", ".join(kinds)}) of {processes} '
            f'process{"es" if processes > 1 else ""}'
        )
        self._console.print(table)

    @contextlib.contextmanager
    def tokenizing(self) -> Iterator[Callable[[str, int, int], None]]:
        """A progress bar for each token index that is built, and a line when they are done.

        Yields:
          What is to be told how far the building is: (name, done, total).
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

        def tell(name: str, done: int, total: int) -> None:
            if name not in names:
                names[name] = progress.add_task(name, total=total)
            progress.update(names[name], completed=done, total=total)

        with progress:
            yield tell
        if names:
            self.say(f'tokenized {", ".join(names)} in {time.perf_counter() - started:.1f} s')

    def data(self, task: OpenTask, evaluations: Mapping[str, EvaluationSet], epochs: float) -> None:
        """How much text there is, and how much of it the run sees."""
        for part in task.parts:
            training, held_out = part.index.training, part.index.held_out
            share = '' if len(task.parts) == 1 else f'{part.name}, {part.weight:.1%} of the rows: '
            self.say(
                f'{share}{_documents(training.num_documents)}, {training.num_bytes / 1e6:,.1f} MB '
                f'to train on; {_documents(held_out.num_documents)} held out'
            )
        evaluated = ', '.join(
            f'{name + ": " if name else ""}{_documents(e.num_documents)}, {len(e.rows)} rows'
            for name, e in evaluations.items()
        )
        self.say(f'{epochs:.2f} epochs of {task.rows_per_epoch:,} rows; evaluated: {evaluated}')

    def layouts(self, layouts: Sequence[ArrayLayout], limit: int = 10) -> None:
        """The largest parameters and how they are laid out."""
        largest = sorted(layouts, key=lambda r: -r.bytes_total)[:limit]
        held = sum(r.bytes_per_device for r in layouts)
        total = sum(r.bytes_total for r in layouts)
        count = sum(math.prod(r.shape) for r in layouts)
        self.heading(
            f'{count / 1e6:,.2f} M parameters in {len(layouts)} arrays: {total:,} bytes, '
            f'{held:,} per device; the {len(largest)} largest'
        )
        table = Table(box=None, pad_edge=False, header_style='bold')
        for name in ('parameter', 'shape', 'logical axis:mesh axis', 'shard'):
            table.add_column(name, overflow='fold')
        table.add_column('bytes/device', justify='right')
        for r in largest:
            table.add_row(
                r.path.removeprefix('params/'),
                _sizes(r.shape),
                _axes(r),
                _sizes(r.shard_shape),
                f'{r.bytes_per_device:,}',
            )
        self._console.print(table)

    def audit(self, audit: Audit) -> None:
        """What a device holds of the whole state, and what it holds beyond its share."""
        held = ', '.join(f'{name} {size:,}' for name, size in audit.by_category.items())
        self.say(
            f'state: {audit.bytes_per_device:,} bytes per device ({held}); '
            f'{audit.replicated_bytes_per_device:,} more than an even share'
        )
        if audit.replicated:
            worst = audit.replicated[0]
            self.say(
                f'most replicated: {worst.path}, {worst.replicated_bytes_per_device:,} bytes '
                f'{worst.reason}'
            )
        for row in audit.policies[:3]:
            self.say(f'policy: {row.path}, {row.policy_bytes_per_device:,} bytes, {row.policy}')

    @contextlib.contextmanager
    def training(self, first_step: int, total_steps: int) -> Iterator[None]:
        """A progress bar around the training loop."""
        if first_step >= total_steps:
            yield
            return
        self.heading(f'training, step {first_step} to {total_steps}')
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
        """The state of the training after a step."""
        loss, rate = scalars['train/loss'], scalars['train/tokens_per_second']
        figures = f'loss {loss:.3f}  {rate:,.0f} tokens/s'
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, figures=figures)
        else:
            self.say(f'step {step}/{total_steps}  {figures}')

    def advance(self, step: int) -> None:
        """Moves the progress bar after a step that has no figures."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def evaluation(
        self,
        step: int,
        name: str,
        scores: Mapping[str, float],
        yardsticks: Mapping[str, float],
    ) -> None:
        """Bits per byte beside what simple models of the same bytes reach."""
        beside = ', '.join(f'{simple} {value:.3f}' for simple, value in yardsticks.items())
        score = f'held-out loss {scores["loss"]:.3f}'
        if 'bits_per_byte' in scores:
            score = f'held-out bits per byte {scores["bits_per_byte"]:.3f} ({beside})'
        self.say(f'step {step}: {name + ": " if name else ""}{score}', style='bold')

    def files(self, files: Mapping[str, Path]) -> None:
        """Where the run's files are."""
        self.heading('files')
        width = max(map(len, files))
        for what, path in ((what, path) for what, path in files.items() if path.exists()):
            self.say(f'{what:<{width}}  {path}')

    def sample(self, prompt: str, continuation: str) -> None:
        """Text that the model wrote; the prompt stands out from its continuation."""
        self.heading('a sample: the prompt, then what the model makes of it')
        self._console.print(Text.assemble((_harmless(prompt), 'bold'), _harmless(continuation)))


def _harmless(text: str) -> str:
    """Text with control characters, which could steer the terminal, made visible."""
    return ''.join(c if c.isprintable() or c == '\n' else '\N{REPLACEMENT CHARACTER}' for c in text)


def _documents(count: int) -> str:
    return f'{count:,} document{"" if count == 1 else "s"}'


def _sizes(shape: Sequence[int]) -> str:
    return 'x'.join(map(str, shape))


def _axes(layout: ArrayLayout) -> str:
    """`embed:data heads:model kv`: each logical axis with the mesh axes it is sharded over."""
    return ' '.join(
        ':'.join(part for part in (named, '+'.join(as_tuple(mesh_axes))) if part) or '-'
        for name, mesh_axes in zip(layout.logical_axes, layout.spec, strict=True)
        for named in [name if isinstance(name, str) else '']
    )


class Throughput:
    """Tokens per second since the last reading, and the share of the time spent on waiting."""

    def __init__(self, tokens_per_step: int, step: int):
        self._tokens_per_step = tokens_per_step
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0

    def read(self, step: int, waited: float) -> dict[str, float]:
        """The rates since the last reading, as metrics.

        Args:
          step: the step that is done.
          waited: seconds that steps have waited for their batches, since the beginning.
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
        """Leaves out time that was spent on something else."""
        self._time += seconds
