"""Forecasts of runs: their train steps on described machines, without data and without arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.forecasting import forecast
from meshwright.jaxpr import estimate_memory, trace_function
from meshwright.report.forecasts import Forecast
from meshwright.time import estimate_step_time, estimate_work
from meshwright.time.layers import describe_layers
from meshwright.time.step_model import WAITING, TimePart
from partitioning.hardware import CHIPS, chip_of
from partitioning.products.flops import count_jaxpr_flops
from partitioning.programs.partitioned_function import PartitionedCallable
from train.config import TrainConfig
from train.errors import ConfigError
from train.objectives import TokenLoss
from train.planning.machines import Machine, move_to, stand_in
from train.planning.searching import Prediction
from train.running.programs import partition_train_step
from train.running.run import PlannedRun, check_vocabulary, plan_run

# Receives a text when a stage begins.
Progress = Callable[[str], None]


class PlannedStep(NamedTuple):
    """The train step of a run before it is compiled.

    `step` is the partitioned function (state, batch) -> (state, metrics).
    """

    run: PlannedRun
    step: PartitionedCallable

    @property
    def arguments(self) -> tuple[object, dict[str, object]]:
        """The abstract state and the abstract batch, with which the step is lowered."""
        return self.run.plan.abstract_state, dict(self.run.batch)


def plan_step(config: TrainConfig) -> PlannedStep:
    """Lays out the state of a run, and partitions its train step. The data is not opened.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured on the mesh of the partitioner.
    """
    run = plan_run(config, config.task.blank_row(config.sequence_length))
    objective, num_tokens, num_logits = config.objective, None, None
    with contextlib.suppress(ConfigError, OSError):  # the file of a tokenizer need not be here
        num_tokens = config.task.num_tokens
    if num_tokens and isinstance(objective, TokenLoss) and objective.vocab_size is None:
        num_logits = objective.count_logits(run.plan.abstract_state, run.batch)
    check_vocabulary(objective, num_tokens, num_logits)
    return PlannedStep(run, partition_train_step(run))


def forecast_run(config: TrainConfig, machine: Machine, **settings: Any) -> Forecast:
    """Forecasts the train step of a run. No data is opened, and no array is created.

    Usage:
      forecast_run(config, parse_machine('v5p:4x4x4')).fits

    Args:
      config: the settings of the run. Its mesh is moved to the machine.
      **settings: as for `meshwright.forecast`. With `compile=False`, all figures are by formula,
        and come within seconds.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured there.
    """
    return forecast_step(plan_step(move_to(config, machine)), machine, **settings)


def plan_on(machine: Machine, make_config: Callable[[], TrainConfig]) -> PlannedStep:
    """Plans the train step of a run, and makes its settings for the machine.

    `make_config` makes the settings, such as `train.gin.find_config`. It finds the devices of the
    machine in place of the devices of this computer. Raises a ConfigError or ValueError if a
    setting cannot be honoured there.
    """
    with stand_in(machine):
        config = make_config()
    try:
        return plan_step(move_to(config, machine))
    except ValueError as error:
        if str(machine) in str(error):
            raise
        raise ConfigError(f'{machine}: {error}') from error


def forecast_step(planned: PlannedStep, machine: Machine, **settings: Any) -> Forecast:
    """Forecasts a planned train step on the machine that it was planned for.
    **settings: as for `meshwright.forecast`.
    """
    return forecast(
        planned.step,
        *planned.arguments,
        topology=machine.topology if machine.on_cpu else None,
        on_cpu=machine.on_cpu,
        **settings,
    )


def predict_step(planned: PlannedStep) -> Prediction:
    """Returns what a planned step needs and takes, by formulas.

    Raises a ConfigError if nothing is known about the chip.
    """
    mesh = planned.run.config.partitioner.mesh
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        raise ConfigError(
            'nothing is known about the chip of the mesh, so its steps have no times: search on '
            f'one of {", ".join(CHIPS)}'
        )
    traced = trace_function(planned.step, *planned.arguments)
    work = estimate_work(traced, chip, layers=describe_layers(traced))
    # Compilers compute nothing twice over devices that can share it.
    even_share = count_jaxpr_flops(traced.jaxpr, kernels=False) / mesh.size
    least = dataclasses.replace(work, matmul_flops=min(work.matmul_flops, even_share))
    time, shared = estimate_step_time(work, mesh), estimate_step_time(least, mesh)
    assert time is not None and shared is not None  # the chip is known
    peak = estimate_memory(traced, chip).peak
    return Prediction(peak=peak, seconds=time.seconds, bound=least_seconds(shared.parts))


# Less than the shares of the parts of a step by formula that any compiled program had: products and
# kernels 1.00, exchanges 0.97, latency 0.20, copies 1.02, other operations 0.37.
_LEAST = {
    'matrix products': 1.0,
    'kernels': 1.0,
    'other operations': 0.35,
    'latency of exchanges': 0.15,
    'copies to and from the host': 0.5,
}
_LEAST_OF_EXCHANGES = 0.95


def least_seconds(time: Iterable[TimePart]) -> float:
    """A time in seconds below every compiled program of a step, from its parts by formula.

    A step waits for the slowest slice or GPU in proportion to its other parts.
    """
    parts = {part.name: part.exposed for part in time}
    waiting = parts.pop(WAITING, 0.0)
    busy = math.fsum(parts.values())
    known = math.fsum(share * parts.pop(name, 0.0) for name, share in _LEAST.items())
    exchanges = _LEAST_OF_EXCHANGES * math.fsum(parts.values())
    return (known + exchanges) * (1 + waiting / busy if busy else 1.0)


_SECONDS_FOR_GIT = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What a forecast is of.

    Attributes:
      run: the runs and gin files, as they were given.
      batch_size: the number of rows in a batch.
      sequence_length: the number of tokens in a row, or None for other data. Rows of inputs and
        targets have both numbers.
      commit: the commit of the current folder, or None if it belongs to no repository of git.
      modified: whether files of the commit have changes.
    """

    run: tuple[str, ...]
    settings: tuple[str, ...]
    batch_size: int
    sequence_length: Any
    num_parameters: int
    commit: str | None
    modified: bool

    def lines(self) -> list[tuple[str, str]]:
        """The names and texts of what it is, for people."""
        length = self.sequence_length
        batch = f'{self.batch_size:,} rows'
        if isinstance(length, int):
            batch += f' of {length:,} tokens, {self.batch_size * length:,} tokens in all'
        elif length is not None:
            batch += f' of {", ".join(f"{n:,} {name}" for name, n in dict(length).items())}'
        found = [
            ('run', shlex.join(self.run)),
            ('settings', shlex.join(f'--gin.{one}' for one in self.settings)),
            ('batch', batch),
            ('parameters', _count(self.num_parameters)),
        ]
        if self.commit is not None:
            found.append(('commit', self.commit[:12] + (', with changes' if self.modified else '')))
        return [(name, text) for name, text in found if text]

    def to_json(self) -> dict[str, Any]:
        """Its fields as JSON."""
        about = dataclasses.asdict(self)
        return {'run': list(about.pop('run')), 'settings': list(about.pop('settings')), **about}


def describe_subject(
    run: PlannedRun, names: Sequence[str], settings: Sequence[str], folder: str = '.'
) -> Subject:
    """Describes a planned run.

    `names` and `settings` are runs and flags as they were given; `folder` has the commit.
    """
    config: TrainConfig = run.config
    parameters = [row for row in run.plan.rows if row.role == 'parameters']
    commit = _git(folder, 'rev-parse', 'HEAD')
    return Subject(
        run=tuple(names),
        settings=tuple(settings),
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        num_parameters=sum(math.prod(row.shape) for row in parameters),
        commit=commit or None,
        modified=bool(commit and _git(folder, 'status', '--porcelain', '--untracked-files=no')),
    )


def _count(number: int) -> str:
    """A number of parameters for people, such as '8.03 B (8,030,261,248)'."""
    for unit, size in (('B', 10**9), ('M', 10**6)):
        if number >= size:
            return f'{number / size:,.2f} {unit} ({number:,})'
    return f'{number:,}'


def _git(folder: str, *arguments: str) -> str:
    """What git answers about a folder, or '' if it does not."""
    command = ['git', '-C', str(Path(folder)), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_FOR_GIT)
    except (OSError, subprocess.SubprocessError):
        return ''
    return done.stdout.strip() if done.returncode == 0 else ''
