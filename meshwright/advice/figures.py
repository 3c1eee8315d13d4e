"""What a function sends and holds, to compare it with the same with a change.

An `Estimate` is by formula, of its trace; `Measured` is of its compiled program.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from meshwright.jax_private import TracedCall
from meshwright.jaxpr import MemoryEstimate, TracedProgram, estimate_memory, lay_out_trace
from meshwright.jaxpr.exchange_list import exchanges_of, walk_exchanges
from meshwright.jaxpr.values import Block, Value
from meshwright.program.collectives import Collective
from meshwright.program.costs import ProgramCosts
from meshwright.time.traced_work import estimate_work
from meshwright.user_lines import user_line
from partitioning.hardware import CHIPS, Chip

# How much more a byte between slices costs than one within a slice.
_BETWEEN_SLICES = 10
LEAST_SAVED = 0.02  # the share of the bytes or of the peak that a change has to save
_MORE = 0.01  # the share by which it may raise the others
MORE_FLOPS = 1.05  # how many more FLOPs a change may need, which then send much less
_MUCH = 0.1  # the share of the bytes that it saves for them
_MORE_PEAK, _MOST = 1.05, 0.25  # the same for the peak by formula
_UNNEEDED = 1.5  # how often more a program sends if its layouts have spread wrongly or do not fit
# A change lowers a figure to this share, so that it is worth a person's time, and raises others to
# this one.
LESS, MORE = 0.97, 1.01

Key = tuple[str, tuple[str, ...], tuple[str, ...], str]
Part = tuple[object, ...]  # a part of a key


@dataclasses.dataclass(frozen=True)
class Sent:
    """Exchanges of arrays of one shape from one line, by formula.

    Attributes:
      axes: the mesh axes, sorted.
      shape: the sizes of the whole array above 1, sorted.
      lines: the user's lines of the operation and of its callers.
      backward: whether it is a part of a backward pass.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    lines: tuple[str, ...]
    backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A function by formula, per device and call.

    Attributes:
      sent: the bytes that a device sends.
      cost: the same, with what is sent between slices weighed.
      peak: the peak of the memory, in bytes.
      flops: the FLOPs of matrix products.
      exchanges: the bytes of each exchange.
      equations: the bytes of the exchanges around each equation of the trace, by its id.
    """

    sent: float
    cost: float
    peak: int
    flops: float
    exchanges: dict[Sent, float]
    equations: dict[int, float]

    def is_far_below(self, sends: float) -> bool:
        """Whether a compiled program, of which a device sends these bytes, sends far more."""
        return sends > _UNNEEDED * self.sent

    def is_better(self, before: Estimate) -> bool:
        """Whether it sends or holds less than another one, and not more of anything else."""
        sends = self.saved(before) > LEAST_SAVED
        holds = before.peak - self.peak > LEAST_SAVED * before.peak
        return (
            (sends or holds)
            and self.cost <= (1 + _MORE) * before.cost
            and self.peak <= before.peak * self._allowed_peak(before)
            and self.flops <= before.flops * self._allowed_flops(before)
        )

    def _allowed_peak(self, before: Estimate) -> float:
        """The peak that a change may need, as a multiple of the peak before.

        Peaks by formula are off by more than this, and compiling decides about what saves so much.
        """
        return _MORE_PEAK if self.saved(before) > _MOST else 1 + _MORE

    def _allowed_flops(self, before: Estimate) -> float:
        """The FLOPs that a change may need, as a multiple of those before.

        Where a wrong layout has spread, devices divide small products that are whole without it.
        """
        return MORE_FLOPS if self.saved(before) > _MUCH else 1 + _MORE

    def saved(self, before: Estimate) -> float:
        """The share of the bytes that it does not send."""
        return (before.cost - self.cost) / before.cost if before.cost else 0.0

    def vanished(self, before: Estimate) -> dict[Sent, float]:
        """The exchanges of another estimate that this one does not have, with their bytes.

        A reduce-scatter in place of an all-reduce sends half of its bytes.
        """
        left = {key: n - self.exchanges.get(key, 0.0) for key, n in before.exchanges.items()}
        return {key: n for key, n in left.items() if n > 0.499 * before.exchanges[key]}


def estimate_call(
    call: TracedCall,
    mesh: Mesh,
    slices: Any = None,
    chip: Chip | None = None,
    most: float = math.inf,
) -> Estimate | None:
    """Estimates what a traced function sends and holds.

    Args:
      call: the function.
      mesh: the mesh.
      slices: the number of slices along axes that span several, by default the mesh's.
      chip: the chip.
      most: None is returned for a function that costs more than these bytes.
    """
    return estimate_program(lay_out_trace(call, mesh, slices), chip, most)


def estimate_program(
    laid_out: TracedProgram,
    chip: Chip | None = None,
    most: float = math.inf,
    *,
    memory: MemoryEstimate | None = None,
) -> Estimate | None:
    """Estimates what a function sends and holds, whose arrays are laid out; see `estimate_call`.

    Args:
      laid_out: the function.
      chip, most: as for `estimate_call`.
      memory: its memory, if it is known already.
    """
    found: dict[Sent, float] = collections.defaultdict(float)
    equations: dict[int, float] = collections.defaultdict(float)
    sent = cost = 0.0
    for step, axes, times in walk_exchanges(laid_out):
        parts = list(exchanges_of(step, axes, laid_out, times))
        nbytes = sum(c.total_bytes for c in parts)
        sent += nbytes
        cost += sum(c.total_bytes * (_BETWEEN_SLICES if c.network == 'dcn' else 1) for c in parts)
        equations[id(step.place.equation)] += nbytes
        given = step.inputs[0]
        key = Sent(
            tuple(sorted(axes)),
            shape_of(given),
            tuple(dict.fromkeys([user_line(step.place.lines), *step.place.lines])),
            step.place.is_backward,
        )
        found[key] += nbytes
    if cost > most:
        return None
    work = estimate_work(laid_out, chip or CHIPS['v5e'], ())
    return Estimate(
        sent=sent,
        cost=cost,
        peak=(memory or estimate_memory(laid_out, chip)).peak,
        flops=work.matmul_flops,
        exchanges=dict(found),
        equations=dict(equations),
    )


def shape_of(value: Value) -> tuple[int, ...]:
    """The sizes of an array above 1, sorted: the same for copies with dimensions moved."""
    return tuple(sorted(n for n in value.shape if n > 1))


def count_steps(block: Block) -> int:
    """The number of steps of a block and of its bodies."""
    return sum(1 + sum(map(count_steps, step.bodies)) for step in block.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A compiled function, per device and call.

    Attributes:
      sent: the bytes that a device sends.
      peak: the peak of its memory, in bytes.
      seconds: the forecast time; None if the chip has no model.
      exchanges: the bytes of its exchanges.
    """

    sent: float
    peak: int
    seconds: float | None
    exchanges: Mapping[Key, float]

    def is_better(self, before: Measured) -> bool:
        """Whether it lowers a figure of another one by 3%, and raises none by more than 1%."""
        pairs = [(self.sent, before.sent), (self.peak, before.peak)]
        if (times := self.times(before)) is not None:
            pairs.append((times[1], times[0]))
        lower = any(after < LESS * figure for after, figure in pairs)
        return lower and all(after <= MORE * figure for after, figure in pairs)

    def times(self, before: Measured) -> tuple[float, float] | None:
        """The forecast times of another one and of this one; None if the chip has no model."""
        if self.seconds is None or before.seconds is None:
            return None
        return before.seconds, self.seconds

    def gone(self, before: Measured) -> frozenset[Key]:
        """The exchanges of another one that are gone, and not only there with other arrays.

        An exchange that is there at another line, or as another kind at its line, is not gone.
        """
        at, of = (self._less_than(before, part) for part in (_line_of, _kind_of))
        return frozenset(
            key
            for key, nbytes in before.exchanges.items()
            if self.exchanges.get(key, 0.0) < nbytes / 2 < min(at[_line_of(key)], of[_kind_of(key)])
        )

    def _less_than(self, before: Measured, part: Callable[[Key], Part]) -> Mapping[Part, float]:
        """The bytes that another one sends more than this one, by a part of the exchanges."""
        sums: dict[Part, float] = collections.defaultdict(float)
        for measured, sign in ((before, 1), (self, -1)):
            for key, nbytes in measured.exchanges.items():
                sums[part(key)] += sign * nbytes
        return sums


def _line_of(key: Key) -> Part:
    """The axes and the line of an exchange, whatever its arrays and its kind."""
    _, axes, _, source = key
    return axes, source


def _kind_of(key: Key) -> Part:
    """The kind and the axes of an exchange, whatever its arrays and its line."""
    kind, axes, _, _ = key
    return kind, axes


def measure_costs(costs: ProgramCosts, seconds: float | None) -> Measured:
    """The figures of a compiled function.

    Args:
      costs: its costs.
      seconds: its forecast time.
    """
    exchanges: dict[Key, float] = collections.defaultdict(float)
    for one in costs.collectives:
        exchanges[key_of(one)] += one.total_bytes
    return Measured(
        sent=sum(exchanges.values()),
        peak=costs.memory.peak if costs.memory is not None else costs.at_peak.nbytes,
        seconds=seconds,
        exchanges=dict(exchanges),
    )


def key_of(collective: Collective) -> Key:
    """What an exchange of one compilation has in common with the same of another one."""
    return collective.kind, collective.axes, collective.arrays, collective.source
