"""The forecast of a function on one machine: memory, exchanged data, and time."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from meshwright.calls.target import BackEnd as BackEnd
from meshwright.causes import Cause
from meshwright.program.collectives import Collective
from meshwright.program.peak_memory import LiveArray
from meshwright.report.plain_values import from_plain, read_object, to_lines, to_plain
from meshwright.time import StepTime
from meshwright.time.work import Origin
from partitioning.amounts import bytes_str
from partitioning.hardware import Chip
from partitioning.mesh import AxisRing, Placement
from partitioning.plan import PlanRow
from partitioning.plan.plan_file import row_from_json, row_to_json

FORMAT = 'meshwright forecast 1'
# Peaks by formula of 15 train steps of 7 to 128 billion parameters were 9% below to 3% above the
# compiler's, except one, whose logits the formula takes to be smaller.
FORMULA_ERROR = 0.1
# What the JSON of a forecast has in addition to its fields.
_DERIVED = ('fits', 'mfu')


def is_close(peak: float, limit: float, error: float) -> bool:
    """Whether the relative error of a peak by formula decides whether it is within a limit."""
    return peak * (1 - error) <= limit < peak * (1 + error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """The memory of a device, in bytes.

    Attributes:
      limit: what a program can use on a device, or None for chips without data.
      peak: the most that is in use at any time.
      arguments: all arguments; the next four are its parts.
      parameters: the parameters.
      optimizer: the optimizer state.
      batch: the batch.
      other: all other arguments.
      live: the arguments, and all arrays that were found in memory at the peak in the text of the
        program. An estimate of the peak; None without a program.
      temporaries: everything that the compiler allocates besides arguments and results; parts of it
        are in use at different times. None without a compiler.
      gradients: the gradients of the parameters, by formula.
      activations: what the forward pass keeps for the backward pass, by formula.
      analytic_peak: the peak by formula, without a compiler.
      buffers: the largest arrays at the peak besides the arguments, each with its cause.
      buffers_from: whether the buffers are from the compiled program, or by formula, as if the
        compiler finds that the memory does not suffice and makes no program.
    """

    limit: int | None
    peak: int
    arguments: int
    parameters: int
    optimizer: int
    batch: int
    other: int
    temporaries: int | None
    gradients: int
    activations: int
    analytic_peak: int
    buffers: tuple[tuple[LiveArray, Cause | None], ...]
    buffers_from: Origin = 'compiler'
    live: int | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a device has the memory; None if its limit is not known."""
        return None if self.limit is None else self.peak <= self.limit

    @property
    def largest(self) -> int:
        """The largest of its figures, in bytes."""
        return max(self.limit or 0, self.peak, self.analytic_peak)

    def show_bytes(self, count: float) -> str:
        """A number of bytes, in units of the same kind as all of these."""
        return bytes_str(count, self.largest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated:
    """An array that several devices hold in full.

    Attributes:
      path: its path in the state.
      nbytes: its size on each device, in bytes.
      axes: the mesh axes along which its copies are equal.
      reason: why.
    """

    path: str
    nbytes: int
    axes: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """A change of a setting, and how much memory a function needs with it.

    Attributes:
      setting: what to write, such as "TransformerConfig.remat = 'full'".
      peak: the most memory of a device that is in use with it, in bytes.
      fits: whether the device has that memory.
      peak_from: whether the peak is from the compiler, or by formula.
    """

    setting: str
    peak: int
    fits: bool
    peak_from: Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastFinding:
    """What is wrong or wasteful in the layouts of a function; see `meshwright.lint`.

    Attributes:
      kind: what it is about: 'whole array', 'optimizer layout', ...
      where: the 'file:line' of the user's code, or the path of an argument.
      message: what is wrong, with figures, and what to write instead.
    """

    kind: str
    where: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """What the forecast itself took, which differs from run to run.

    Attributes:
      seconds: the time of tracing and compiling.
      peak_rss: the most memory that the process had in use, in bytes.
    """

    seconds: float
    peak_rss: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Forecast:
    """The forecast of one call of a function on one machine. Figures are per device and call.

    `forecast_table([forecast])` is its text; `print` shows only the memory.

    Attributes:
      function: the name of the function.
      topology: the machine, 'v5p:4x4x4'.
      num_slices: its number of slices.
      chip: its chip, or None for chips without data.
      num_devices: its number of devices.
      mesh: the size of each mesh axis.
      back_end: the compiler that the figures come from.
      back_end_version: its name and version: 'libtpu 0.0.52'.
      memory: the memory, and whether it suffices.
      model_flops: the FLOPs of the function without recomputation, from its jaxpr.
      program_flops: the FLOPs that the function executes, with recomputation.
      time: the time, or None if the chip has no model.
      collectives: the exchanges of data, those with the most bytes first, each with its cause.
      replicated: the arrays of the arguments that several devices hold in full, the largest first.
      warnings: what the compiler warned about, such as involuntary full rematerialization.
      notes: what is exact in this forecast and what is not.
      compilation: what the forecast took.
      arrays: the arrays of the arguments, in their order, each with its layout and reasons.
      rings: the network and the distances along each axis of the mesh.
      placement: where the devices of the mesh are in the machine; None if the mesh has no devices.
      changes: what would make the function fit, if it does not.
      findings: what is wrong or wasteful in its layouts.
      price: what a chip costs per hour, in any currency, or None.
    """

    function: str
    topology: str
    num_slices: int
    chip: Chip | None
    num_devices: int
    mesh: Mapping[str, int]
    back_end: BackEnd
    back_end_version: str
    memory: MemoryForecast
    model_flops: float
    program_flops: float
    time: StepTime | None
    collectives: tuple[tuple[Collective, Cause | None], ...]
    replicated: tuple[Replicated, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    compilation: Compilation
    arrays: tuple[PlanRow, ...] = ()
    rings: tuple[AxisRing, ...] = ()
    placement: Placement | None = None
    changes: tuple[MemoryChange, ...] = ()
    findings: tuple[ForecastFinding, ...] = ()
    price: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the function fits into the memory of a device; None if its limit is not known."""
        return self.memory.fits

    @property
    def is_close(self) -> bool:
        """Whether the peak is by formula, and its error decides whether the function fits."""
        limit, peak = self.memory.limit, self.memory.peak
        if limit is None or self.back_end != 'none':
            return False
        return is_close(peak, limit, FORMULA_ERROR)

    @property
    def most_bytes(self) -> float:
        """The largest number of bytes in its tables."""
        sent = sum(collective.total_bytes for collective, _ in self.collectives)
        return max(self.memory.largest, sent)

    def show_bytes(self, count: float) -> str:
        """A number of bytes, in units of the same kind as all others in its tables."""
        return bytes_str(count, self.most_bytes)

    @property
    def mfu(self) -> float | None:
        """The share of the chip's peak rate that the model's FLOPs make up."""
        if self.time is None or self.chip is None:
            return None
        return self.model_flops / (self.time.seconds * self.chip.peak_flops_per_device)

    def __repr__(self) -> str:
        peak, limit = self.memory.peak, self.memory.limit
        known = '' if limit is None else f' of {bytes_str(limit)}'
        return f'<Forecast of {self.function} on {self.topology}: {bytes_str(peak)}{known}>'

    def __str__(self) -> str:
        # The terminal's table imports this type, and is needed by those who print it only.
        drawing = importlib.import_module('meshwright.report.terminal')
        return str(drawing.forecast_table([self]))

    def _repr_html_(self) -> str:
        # The page imports this type, and is needed in notebooks only.
        drawing = importlib.import_module('meshwright.report.page.notebook')
        return str(drawing.draw_forecast(self))

    def as_dict(self) -> dict[str, Any]:
        """The forecast as values that JSON can hold, with "fits" and "mfu" next to its fields."""
        derived = {'format': FORMAT, 'fits': self.fits, 'mfu': self.mfu}
        held = to_plain(dataclasses.replace(self, arrays=()))
        return derived | held | {'arrays': [row_to_json(row) for row in self.arrays]}

    def to_json(self) -> str:
        """The text of a file, with a line for each part and each array.

        Two forecasts of one program differ only in "compilation".
        """
        return to_lines(self.as_dict())

    @classmethod
    def from_json(cls, text: str) -> Forecast:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: if the text is not a forecast.
        """
        held = read_object(text, FORMAT)
        fields = {k: v for k, v in held.items() if k not in (*_DERIVED, 'arrays')}
        made = from_plain(cls, fields, 'forecast')
        rows = tuple(row_from_json(row, made.mesh) for row in held.get('arrays', ()))
        return dataclasses.replace(made, arrays=rows)
