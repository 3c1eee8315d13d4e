"""The output of a run: phases, tables and progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from partitioning.untrusted_text import printable
from train.processes.activity import Activity
from train.processes.together import raise_on_all_processes
from train.reporting.reports import format_seconds

# A phase that takes longer is mentioned when it ends, in seconds.
WORTH_A_LINE = 1.0


class SafeConsole(Console):
    """Prints no control characters except its own, and prints brackets as they are.

    Names of files and of parameters reach the terminal in lines, tables and progress bars.
    """

    def __init__(self, **settings: Any):
        super().__init__(**{'markup': False, 'highlight': False, 'emoji': False} | settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        return [
            segment
            if segment.control or segment.text.isprintable() or segment.text == '\n'
            else Segment(printable(segment.text), segment.style)
            for segment in super().render(renderable, options)
        ]

    def on_broken_pipe(self) -> None:
        """Prints nothing from now on, so that the run can save its state."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class RunConsole:
    """Prints the progress of a run. Only process 0 prints.

    `console` is where to print, by default standard output.

    Attributes:
      seconds: the duration of each phase, by its title.
      activity: what the run does at the moment, for its watchdog.
    """

    def __init__(self, console: Console | None = None):
        quiet = jax.process_index() != 0
        self._console = console or SafeConsole(quiet=quiet)
        self.is_terminal = self._console.is_terminal
        if not self.is_terminal:
            self._console.width = 160  # In a file or a pipe, the rows of a table may be long.
        self._progress: Progress | None = None
        self.seconds: dict[str, float] = {}
        self.activity = Activity()

    def say(self, message: str, style: str | None = None) -> None:
        """Prints one line without interpreting its markup. Only a terminal wraps it."""
        text = Text(message, style=style or '')
        self._console.print(text, soft_wrap=not self.is_terminal)

    def show(self, renderable: Any) -> None:
        """Prints a table or another object of rich."""
        self._console.print(renderable)

    def heading(self, title: str) -> None:
        """Prints a heading."""
        if self.is_terminal:
            self._console.rule(title, align='left', style='dim')
        else:
            self.say(f'-- {title}')

    @contextlib.contextmanager
    def phase(self, title: str, *, together: bool = True) -> Iterator[None]:
        """Runs a phase of a run and measures its time. A terminal shows a spinner.

        `together` says whether the phase fails on all processes if it fails on one. All of them
        must then enter it together, and its body must not wait for other processes.
        """
        started = time.perf_counter()
        busy: Any = contextlib.nullcontext()
        if self.is_terminal and self._progress is None:
            # A Live draws itself before its thread starts. A rich Status does not, and a line that
            # is printed at once would follow the spinner on its line.
            spinner = Spinner('dots', Text(f'{title} ...'), style='status.spinner')
            busy = Live(spinner, console=self._console, refresh_per_second=12.5, transient=True)
        failing = raise_on_all_processes(title) if together else contextlib.nullcontext()
        with busy, self.activity.doing(title), failing:
            yield
        self.seconds[title] = time.perf_counter() - started
        if self.seconds[title] > WORTH_A_LINE:
            self.say(f'{title}: {format_seconds(self.seconds[title])}', style='dim')

    @contextlib.contextmanager
    def tokenizing(self) -> Iterator[Callable[[str, int, int], None]]:
        """Shows a progress bar for each token index that is built, and a line at the end.

        Yields the function to call with (name of the source, bytes done, bytes in total).
        """
        started, names = time.perf_counter(), dict[str, TaskID]()
        progress = self._make_bar(TaskProgressColumn())

        def report(name: str, done: int, total: int) -> None:
            if name not in names:
                names[name] = progress.add_task(f'tokenizing {name}', total=total)
            progress.update(names[name], completed=done, total=total)
            self.activity.progress()

        with progress:
            yield report
        if names:
            self.say(f'tokenized {", ".join(names)} in {time.perf_counter() - started:.1f} s')

    @contextlib.contextmanager
    def training(self, first_step: int, total_steps: int) -> Iterator[None]:
        """Shows a progress bar during the training loop."""
        if first_step >= total_steps:
            yield
            return
        self.heading(f'training from step {first_step} to {total_steps}')
        bar = Progress(
            TextColumn('step'),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn('{task.fields[figures]}', markup=False),
            console=self._console,
        )
        bar.add_task('train', total=total_steps, completed=first_step, figures='')
        self._progress = bar if self.is_terminal else None
        try:
            with self._progress or contextlib.nullcontext():
                yield
        finally:
            self._progress = None
            self.activity.end_loop()

    @contextlib.contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows a progress bar on a terminal. Yields what to call with the number so far."""
        progress = self._make_bar(MofNCompleteColumn())
        counted = progress.add_task(title, total=total)
        before, self._progress = self._progress, self._progress or progress

        def show(number: int) -> None:
            progress.update(counted, completed=number)
            self.activity.progress()

        try:
            with progress if before is None else contextlib.nullcontext():
                yield show
        finally:
            self._progress = before

    def _make_bar(self, column: ProgressColumn) -> Progress:
        """A progress bar with its title, a column that says how much is done, and the time left."""
        return Progress(
            TextColumn('{task.description}', markup=False),
            BarColumn(bar_width=None),
            column,
            TimeRemainingColumn(),
            TextColumn('left'),
            console=self._console,
            transient=True,
            disable=not self.is_terminal,
        )

    def step(self, step: int, total_steps: int, figures: str) -> None:
        """Prints the figures of a step, or shows them in the progress bar."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, figures=figures)
        else:
            self.say(f'step {step}/{total_steps}  {figures}')

    def scores(self, step: int, name: str, text: str) -> None:
        """Prints the scores of an evaluator."""
        self.say(f'step {step}: {name}: {text}', style='bold')

    def files(self, files: Mapping[str, Any]) -> None:
        """Prints the paths of the run's files that exist, by what they contain."""
        self.heading('files')
        width = max(map(len, files), default=0)
        for content, path in files.items():
            if path.exists():
                self.say(f'{content:<{width}}  {path}')

    def sample(self, prompt: str, continuation: str) -> None:
        """Prints a prompt and the model's continuation of it."""
        self._console.print(Text.assemble((prompt, 'bold'), continuation))
