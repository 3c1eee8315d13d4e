"""Fits the constants of the step-time model on measured steps.

The error of a forecast is the logarithm of its ratio to the measurement. Shares and efficiencies
vary by the logarithm of their odds, so that they stay between 0 and 1, and other constants by their
logarithms, around a usual value with a usual spread, which decides where the rows say little. Rows
with large errors count less than by their squares, as in Huber's loss.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.time.constants import ChipConstants
from meshwright.time.layers import Layers
from meshwright.time.loads import Loads
from meshwright.time.step_model import busy_parts, wait_for_slowest
from partitioning.hardware import CHIPS

_TYPICAL_ERROR = 0.05  # beyond it, rows count less
_LEAST_GAIN = 0.001  # of the sum of losses; smaller steps end the fit
# These are positive numbers; all other constants are shares or efficiencies, between 0 and 1.
_POSITIVE = ('cycles_factor', 'network_latency', 'speed_spread')


@dataclasses.dataclass(frozen=True)
class Free:
    """A constant that is fitted. Several of one name multiply, for example of a kind and a chip.

    Attributes:
      name: the field of `ChipConstants`.
      spread: the usual spread of its logarithm, or of the logarithm of the odds of a share.
      chips: the chips that share it.
    """

    name: str
    spread: float
    chips: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A measured row with the loads of the program that stands for it.

    Attributes:
      group: rows of one group measure the same workload, at most with other flags or versions.
      family: the chip and the model, without framework, batch and size of the machine.
      framework: the framework, with its version if the row says it, for people.
      software: the framework whose programs have a bias of their own, or ''.
      flops: the model's FLOPs per device.
      peak: the peak rate of a device, in FLOP/s.
      dense: whether it is a dense model in bfloat16.
      origin: 'compiler' if the program was compiled, 'jaxpr' if it was traced.
      layers: its products, of traced programs.
      is_own: whether it is the program that was measured, and not one of ours in its place.
    """

    name: str
    chip: str
    platform: str
    group: str
    family: str
    framework: str
    software: str
    seconds: float
    flops: float
    peak: float
    loads: Loads
    dense: bool
    superseded: bool
    origin: str = 'compiler'
    layers: Layers | None = None
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class Bias:
    """What programs of another framework take in comparison with ours.

    Attributes:
      factor: the time of a step, as a multiple of ours.
      seconds: what each step takes in addition, such as for its input.
    """

    factor: float = 1.0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants.

    They are the constants of each chip, and the bias of each framework that has one.
    """

    constants: Mapping[str, ChipConstants]
    software: Mapping[str, Bias]

    def predict(self, case: Case) -> float:
        """The forecast of a case in seconds, with the bias of its framework."""
        bias = self.software.get(case.software, Bias())
        return bias.factor * self.unbiased(case) + bias.seconds

    def unbiased(self, case: Case) -> float:
        """The forecast of a case in seconds, as users see it for a program of their own."""
        constants, busy = self.constants[case.chip], self.busy(case)
        return busy + wait_for_slowest(case.loads, constants, busy).exposed

    def busy(self, case: Case) -> float:
        """The forecast without the bias, and without what slices or GPUs wait for each other."""
        parts = busy_parts(case.loads, self.constants[case.chip])
        return math.fsum(part.exposed for part in parts)


def fit_constants(
    cases: Sequence[Case],
    usual: Mapping[str, ChipConstants],
    free: Sequence[Free],
    software: Mapping[str, Bias],
    start: np.ndarray | None = None,
) -> tuple[Fit, np.ndarray]:
    """Fits constants by damped Gauss-Newton steps.

    The free constants are fitted around the usual ones of each chip, and so are the biases of
    frameworks that are not 0. It begins with what an earlier fit has returned as logarithms, by
    default 0, and returns the constants, and their logarithms to the usual values.
    """
    biases = _list_biases(software)
    spreads = np.array([f.spread for f in free] + [_BIAS_SPREADS[field] for _, field in biases])
    affected = [np.array([case.chip in f.chips for case in cases]) for f in free]
    affected += [np.array([case.software == name for case in cases]) for name, _ in biases]

    def residuals(x: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
        fit = _apply(x, usual, free, software)
        return np.array(
            [
                math.log(fit.predict(case) / case.seconds)
                for i, case in enumerate(cases)
                if chosen is None or chosen[i]
            ]
        )

    def cost(x: np.ndarray, errors: np.ndarray) -> float:
        scaled = errors / _TYPICAL_ERROR
        lost = 4 * (np.sqrt(1 + scaled**2 / 2) - 1)
        return float(np.sum(lost) + np.sum((x / spreads) ** 2))

    x = np.zeros(len(spreads)) if start is None else start.copy()
    errors = residuals(x)
    best, damping, gain = cost(x, errors), 1.0, math.inf
    while gain > _LEAST_GAIN:
        slopes = np.zeros((len(cases), len(x)))
        for i, chosen in enumerate(affected):
            if chosen.any():
                moved = x.copy()
                moved[i] += 1e-4
                slopes[chosen, i] = (residuals(moved, chosen) - errors[chosen]) / 1e-4
        weights = 1 / np.sqrt(1 + (errors / _TYPICAL_ERROR) ** 2 / 2) / _TYPICAL_ERROR**2
        matrix = slopes.T @ (weights[:, None] * slopes) + np.diag(1 / spreads**2)
        gradient = slopes.T @ (weights * errors) + x / spreads**2
        gain = -1.0
        while damping < 1e8 and gain <= 0:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -gradient)
            moved = x + np.clip(step, -0.5, 0.5)
            errors_there = residuals(moved)
            gain = best - cost(moved, errors_there)
            damping = damping / 5 if gain > 0 else damping * 4
        if gain > 0:
            x, errors, best = moved, errors_there, best - gain
    return _apply(x, usual, free, software), x


_BIAS_SPREADS = {'factor': 0.2, 'seconds': 0.7}


def _list_biases(software: Mapping[str, Bias]) -> list[tuple[str, str]]:
    """The numbers to fit in the biases: the name of each framework and a field."""
    return [
        (name, field) for name, bias in software.items() for field in _BIAS_SPREADS
        if getattr(bias, field)
    ]  # fmt: skip


def _apply(
    x: np.ndarray,
    usual: Mapping[str, ChipConstants],
    free: Sequence[Free],
    software: Mapping[str, Bias],
) -> Fit:
    moves: dict[tuple[str, str], float] = collections.defaultdict(float)
    for value, constant in zip(x, free, strict=False):
        for chip in constant.chips:
            moves[chip, constant.name] += float(value)
    moved: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for (chip, name), by in moves.items():
        moved[chip][name] = _move(name, getattr(usual[chip], name), by)
    constants = {
        chip: dataclasses.replace(one, **moved.get(chip, {})) for chip, one in usual.items()
    }
    found = dict(software)
    for (name, field), value in zip(_list_biases(software), x[len(free) :], strict=True):
        number = getattr(software[name], field) * math.exp(value)
        found[name] = dataclasses.replace(found[name], **{field: number})
    return Fit(constants, found)


def _move(name: str, usual: float, by: float) -> float:
    """A constant, some logarithms away from its usual value, or of its odds if it is a share."""
    if name in _POSITIVE:
        return usual * math.exp(by)
    return 1 / (1 + (1 - usual) / usual * math.exp(-by))


# Which constants are fitted, around which usual values, for which chips.

TPUS = tuple(chip.name for chip in CHIPS.values() if chip.platform == 'tpu')
GPUS = tuple(chip.name for chip in CHIPS.values() if chip.platform == 'gpu')
# The matrix units of these have 256 x 256 elements, of the others 128 x 128.
WIDE = ('v6e', 'tpu7x')
NARROW = tuple(name for name in TPUS if name not in WIDE)
MEGACORE = ('v4', 'v5p')

# 45 of 50 GB/s per link and direction, as in the scaling book; the bandwidths to the host are from
# the same table.
_TPU = ChipConstants(
    matmul_efficiency=0.85,
    product_traffic=0.4,
    cycles_factor=1.0,
    kernel_efficiency=0.6,
    memory_efficiency=0.9,
    link_efficiency=0.9,
    network_efficiency=0.8,
    hidden_share=0.7,
    hidden_network_share=0.7,
    host_bandwidth=15e9,
    host_interference=0.1,
    exchange_latency=10e-6,
    hop_latency=1e-6,
    network_latency=80e-6,
    speed_spread=0.02,
    error=0.3,
    compiled_error=0.3,
)
_GPU = dataclasses.replace(
    _TPU,
    matmul_efficiency=0.75,
    kernel_efficiency=0.5,
    link_efficiency=0.8,
    hidden_share=0.6,
    hidden_network_share=0.2,
    host_bandwidth=50e9,
    network_latency=5e-6,
)
_WIDE = dataclasses.replace(_TPU, host_bandwidth=32e9)
USUAL = dict.fromkeys(NARROW, _TPU) | dict.fromkeys(WIDE, _WIDE) | dict.fromkeys(GPUS, _GPU)
# Programs of these frameworks run other code than ours, or wait for their input. MaxText's have no
# bias. 'compiled' and 'eager' say whether torch.compile was used.
SOFTWARE = {
    'axlearn on TPUs': Bias(1.05, 0.05),
    'axlearn on GPUs': Bias(1.4),
    'torchtitan, compiled': Bias(1.4),
    'torchtitan, eager': Bias(1.4),
}

# All chips of a platform share a value. The two cores of a device in chips with megacore share each
# product.
FREE = (
    Free('matmul_efficiency', 0.5, TPUS),
    Free('matmul_efficiency', 0.15, MEGACORE),
    Free('product_traffic', 1.0, TPUS),
    Free('kernel_efficiency', 0.7, TPUS),
    Free('hidden_share', 1.0, TPUS),
    Free('hidden_network_share', 1.0, TPUS),
    Free('network_latency', 0.7, TPUS),
    Free('speed_spread', 0.7, (*TPUS, *GPUS)),
    Free('matmul_efficiency', 0.5, GPUS),
    Free('product_traffic', 1.0, GPUS),
    Free('kernel_efficiency', 0.5, GPUS),
    Free('hidden_share', 1.0, GPUS),
    Free('hidden_network_share', 1.0, GPUS),
    Free('network_latency', 0.7, GPUS),
)
# What the estimates of the compiler are multiplied by.
FREE_OF_COMPILED = (Free('cycles_factor', 0.2, TPUS),)


def fit_all(cases: Sequence[Case], start: np.ndarray | None = None) -> tuple[Fit, np.ndarray]:
    """Fits the constants of all chips; see `fit_constants`.

    Traced steps, which exist for every row, decide everything except the factor of the compiler's
    estimates.
    """
    traced = [case for case in cases if case.origin == 'jaxpr']
    compiled = [case for case in cases if case.loads.estimated_products is not None]
    fit, x = fit_constants(traced, USUAL, FREE, SOFTWARE, start)
    if compiled:
        factors, _ = fit_constants(compiled, fit.constants, FREE_OF_COMPILED, {})
        fit = Fit(factors.constants, fit.software)
    return fit, x
