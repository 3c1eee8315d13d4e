"""The speed of a run: tokens per second, model FLOP/s, memory, and the time that remains."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from partitioning.amounts import bytes_str
from partitioning.hardware import chip_of
from train.reporting.reports import format_seconds

if TYPE_CHECKING:
    from train.running.run import Run


# The arrays of a batch that hold its tokens.
TOKENS = ('encoder_input_tokens', 'decoder_target_tokens')


class Meter:
    """Measures the speed of steps between two records of metrics.

    Args:
      run: the run.
      step: the step at which the measurement starts.
      flops: the FLOPs of the model in one step, or None if they are not known.
    """

    def __init__(self, run: Run, step: int, flops: float | None):
        config = run.config
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0
        self._total_steps = config.total_steps
        tokens = [math.prod(run.batch[name].shape) for name in TOKENS if name in run.batch]
        self._unit = 'tokens' if tokens else 'rows'
        self._per_step = sum(tokens) or config.batch_size
        self._flops, self._peak = flops, peak_flops(config.partitioner.mesh.devices.flat)

    def read(self, step: int, waited: float) -> dict[str, float]:
        """Returns the metrics of the steps since the last call.

        Args:
          step: the newest finished step.
          waited: the time that all steps have waited for their batches, in seconds.
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
