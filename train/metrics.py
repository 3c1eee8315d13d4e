"""Metrics in files: JSON lines and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
from tensorboardX import SummaryWriter


class MetricWriter:
    """Writes scalars to `<model_dir>/metrics.jsonl` and `<model_dir>/tensorboard/`.

    Only process 0 writes. When a run resumes, records after the step it resumes from are dropped:
    the run wrote them before it was interrupted, and will write them again. Each step therefore
    has one record.

    Args:
      model_dir: the folder of the run.
      resumed_step: the step that the run resumes from, or 0.

    Attributes:
      path: the JSONL file.
      tensorboard_dir: the folder of the event files.
      num_dropped: the number of records that were dropped.
    """

    def __init__(self, model_dir: Path, resumed_step: int):
        self.path = model_dir / 'metrics.jsonl'
        self.tensorboard_dir = model_dir / 'tensorboard'
        self.num_dropped = 0
        self._active = jax.process_index() == 0
        if not self._active:
            return
        self.num_dropped = _drop_after(self.path, resumed_step)
        self._file = self.path.open('a')
        self._events = SummaryWriter(str(self.tensorboard_dir), purge_step=resumed_step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one record: `{"step": step, "train/loss": ..., ...}`."""
        if not self._active:
            return
        values = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps({'step': step, **values}) + '\n')
        self._file.flush()
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        if self._active:
            self._file.close()
            self._events.close()


def _drop_after(path: Path, step: int) -> int:
    """Drops records after a step and incomplete lines; returns how many were dropped."""
    if not path.exists():
        return 0
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if _is_record(line, step)]
    if kept != lines:
        temporary = path.with_suffix('.tmp')
        temporary.write_text(''.join(kept))
        os.replace(temporary, path)
    return len(lines) - len(kept)


def _is_record(line: str, last_step: int) -> bool:
    """Whether a line is a complete record of `last_step` or an earlier step."""
    try:
        return line.endswith('\n') and json.loads(line)['step'] <= last_step
    except (ValueError, TypeError, KeyError):
        return False
