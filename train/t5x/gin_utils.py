"""T5X's `gin_utils`: how a run writes a summary of its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from train.gin.text import operative_text
from train.reporting.metric_files import EventFile
from train.reporting.writers import JsonWriter, MetricWriter, TensorBoardWriter
from train.t5x.refusals import refusal


class SummaryWriter:
    """Writes texts and numbers for TensorBoard to a folder, by the names of T5X's writers."""

    def __init__(self, directory: epath.Path):
        self._directory = directory

    @functools.cached_property
    def _events(self) -> EventFile:
        # Files are named after the second, and the metrics have a file in the same folder.
        return EventFile(self._directory, 'summarize_config_fn', suffix='.summary')

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts by name, in Markdown."""
        self._events.write_texts(step, texts.items())

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers by name."""
        self._events.write_scalars(step, scalars.items())

    def flush(self) -> None:
        """Has no effect: what has been written is complete."""

    def close(self) -> None:
        """Closes the files."""
        if '_events' in self.__dict__:
            self._events.close()


def summarize_gin_config(
    model_dir: str, summary_writer: SummaryWriter | None, step: int = 0
) -> None:
    """Writes the settings that gin has used, as a text for TensorBoard.

    Every run also writes them to `<model_dir>/config.gin`.

    Args:
      model_dir: the folder of the run.
      summary_writer: the writer, or None to write nothing.
      step: the step of the text.
    """
    text = operative_text()
    if summary_writer is not None and text.strip():
        lines = [f'    {line}' for line in text.splitlines()]  # Markdown shows them as they are
        summary_writer.write_texts(step, {'gin_config': '\n'.join(lines)})
        summary_writer.flush()


class _Summary:
    """Calls a function when a run opens its writers, and writes no metrics."""

    def __init__(self, function: Callable[..., None], directory: epath.Path, step: int):
        self._writer = SummaryWriter(epath.Path(directory) / 'tensorboard')
        function(str(directory), self._writer, step)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        self._writer.close()


def writers_with(key: str, function: Any) -> tuple[Callable[..., MetricWriter], ...]:
    """Returns the writers of a run, which also calls `summarize_config_fn`.

    That is a function of the folder of the run, a `SummaryWriter` and the step, or None.
    """
    writers = (JsonWriter, TensorBoardWriter)
    if function is None:
        return writers
    if not callable(function):
        raise refusal(key, function, 'write @gin_utils.summarize_gin_config, without parentheses')
    return (*writers, functools.partial(_Summary, function))
