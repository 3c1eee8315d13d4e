"""Measures a run: the time to its first step, the speed of its steps, and traces of some steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from partitioning.amounts import bytes_str
from partitioning.hardware import chip_of
from train.processes.activity import wait_for_devices
from train.processes.launching.spares import FIRST_STEP, seconds_as_process, seconds_since_loss
from train.reporting.reports import format_seconds

_WORTH_NAMING = 0.03  # of the time to the first step

# When the process began that a command runs in, on the clock of `time.perf_counter`. A program of
# someone's own that calls the trainer has its own beginning.
_began: list[float] = []


def note_start_of_process() -> None:
    """Notes that this process was started for one run, whose time therefore begins with it."""
    age = seconds_as_process()
    _began[:] = [time.perf_counter() - (_age_of_process() if age is None else age)]


class StartClock:
    """Measures the time from the start of a run to the end of its first step.

    If a launcher has started the run again, the time begins when it saw the loss of a process.
    """

    def __init__(self) -> None:
        now = time.perf_counter()
        self._began = _began.pop() if _began else now
        self._imports = now - self._began
        since_loss = seconds_since_loss()
        self._lost_at = None if since_loss is None else now - since_loss

    def report(self, phases: Mapping[str, float]) -> tuple[str, dict[str, float]]:
        """Returns the time until now, and the seconds of each phase, as a line and as metrics."""
        parts, began = {'imports': self._imports, **phases}, self._began
        if self._lost_at is not None:
            parts, began = {'ending the others': began - self._lost_at, **parts}, self._lost_at
        total = time.perf_counter() - began
        longest = {n: s for n, s in parts.items() if s > _WORTH_NAMING * total}
        rest = total - sum(longest.values())
        shown = [
            f'{name} {format_seconds(seconds)}'
            for name, seconds in {**longest, 'the rest': rest}.items()
        ]
        metrics = {f'start/seconds_{n.replace(" ", "_")}': s for n, s in parts.items() if s}
        line = f'{FIRST_STEP}after {format_seconds(total)}'
        if self._lost_at is not None:
            line = f'{FIRST_STEP}{format_seconds(total)} after the loss of a process'
        return f'{line}: {", ".join(shown)}', {'start/seconds_to_first_step': total, **metrics}


def _age_of_process() -> float:
    """The seconds since this process was started, or since Python noted a time, without Linux."""
    try:
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        booted = float(Path('/proc/uptime').read_text().split()[0])
        return booted - int(fields[19]) / os.sysconf('SC_CLK_TCK')
    except (OSError, ValueError, IndexError):
        return time.process_time()


# The arrays of a batch that hold its tokens.
TOKENS = ('encoder_input_tokens', 'decoder_target_tokens')


class Meter:
    """Measures the speed of steps between two records of metrics.

    Args:
      batch: the ShapeDtypeStructs of a training batch, each [batch, ...].
      flops: the FLOPs of the model in one step, or None if they are not known.
    """

    def __init__(
        self,
        batch: Mapping[str, jax.ShapeDtypeStruct],
        devices: Iterable[Any],
        *,
        total_steps: int,
        step: int,
        flops: float | None,
    ):
        self.restart(step)
        self._total_steps = total_steps
        tokens = [math.prod(batch[name].shape) for name in TOKENS if name in batch]
        self._unit = 'tokens' if tokens else 'rows'
        self._per_step = sum(tokens) or next(iter(batch.values())).shape[0]
        self._flops, self._peak = flops, peak_flops(devices)

    def restart(self, step: int) -> None:
        """Begins a new measurement after a step."""
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0

    def read(self, step: int, waited: float) -> dict[str, float]:
        """Returns the metrics of the steps since the last call.

        `step` is the newest finished one; all steps have waited for batches for `waited` seconds.
        """
        now = time.perf_counter()
        elapsed = max(now - self._time, 1e-9)
        seconds = elapsed / max(step - self._step, 1)
        metrics = {
            f'train/{self._unit}_per_second': self._per_step / seconds,
            'train/seconds_per_step': seconds,
            'train/input_wait': (waited - self._waited) / elapsed,
            'train/seconds_left': seconds * (self._total_steps - step),
        }
        self._step, self._time, self._waited = step, now, waited
        if self._flops and self._peak:
            metrics['train/mfu'] = self._flops / seconds / self._peak
        memory = memory_in_use()
        if memory is not None:
            metrics['train/device_memory_bytes'] = memory
        return metrics

    def skip(self, seconds: float) -> None:
        """Excludes time that was not spent on training, in seconds."""
        self._time += seconds


def peak_flops(devices: Iterable[Any]) -> float | None:
    """Returns the peak bfloat16 FLOP/s of all devices, or None if a chip is not known."""
    chips = [chip_of(device.device_kind) for device in devices]
    peaks = [chip.peak_flops_per_device for chip in chips if chip is not None]
    return math.fsum(peaks) if len(peaks) == len(chips) else None


def memory_in_use() -> int | None:
    """Returns the largest peak memory of the local devices, or None if they do not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s['peak_bytes_in_use'] for s in stats if s and 'peak_bytes_in_use' in s]
    return max(peaks, default=None)


def format_figures(metrics: Mapping[str, float]) -> str:
    """Formats the metrics of a step for people: loss, learning rate, gradient norm, speed, ..."""
    parts = [f'loss {metrics["train/loss"]:.3f}']
    for name, label in (('learning_rate', 'lr'), ('gradient_norm', 'grad')):
        if f'train/{name}' in metrics:
            parts.append(f'{label} {metrics[f"train/{name}"]:.3g}')
    parts += [
        f'{metrics[f"train/{unit}_per_second"]:,.0f} {unit}/s'
        for unit in ('tokens', 'rows')
        if f'train/{unit}_per_second' in metrics
    ]
    if 'train/mfu' in metrics:
        parts.append(f'{metrics["train/mfu"]:.1%} MFU')
    if 'train/device_memory_bytes' in metrics:
        parts.append(bytes_str(metrics['train/device_memory_bytes']))
    return '  '.join([*parts, f'{format_seconds(metrics["train/seconds_left"])} left'])


class Profiler:
    """Traces a range of steps. If the run ends inside the range, `close` ends the trace."""

    def __init__(self, directory: Any, steps: Sequence[int] | None):
        self._directory, self._steps, self._tracing = directory, steps, False

    def before(self, step: int) -> None:
        """Starts the trace before its first step."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._directory))
            self._tracing = True

    def after(self, step: int, state: Any) -> None:
        """Ends the trace after its last step, whose work it waits for."""
        if self._tracing and self._steps is not None and step == self._steps[1]:
            wait_for_devices(state)
            self.close()

    def close(self) -> None:
        """Ends the trace, if there is one."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
