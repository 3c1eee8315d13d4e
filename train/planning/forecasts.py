"""Forecasts of runs: their train steps on described machines, without data and without arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from meshwright.forecasting import forecast
from meshwright.report.forecasts import Forecast
from partitioning.programs import PartitionedCallable
from train.config import TrainConfig
from train.errors import ConfigError
from train.objectives import TokenLoss
from train.planning.machines import Machine, move_to, stand_in
from train.running.programs import partition_train_step
from train.running.run import PlannedRun, check_vocabulary, plan_run

# Receives a text when a stage begins.
Progress = Callable[[str], None]


class PlannedStep(NamedTuple):
    """The train step of a run before it is compiled.

    Attributes:
      run: the run.
      step: the partitioned function (state, batch) -> (state, metrics).
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
    _check_vocabulary(run)
    return PlannedStep(run, partition_train_step(run))


def _check_vocabulary(run: PlannedRun) -> None:
    """Checks that the model has every token of the task, if that is known without the data."""
    objective = run.config.objective
    try:
        num_tokens = run.config.task.num_tokens
    except (ConfigError, OSError):  # the file of a tokenizer, which need not be here
        return
    num_logits = None
    if isinstance(objective, TokenLoss) and objective.vocab_size is None:
        num_logits = objective.count_logits(run.plan.abstract_state, run.batch)
    check_vocabulary(objective, num_tokens, num_logits)


def forecast_run(config: TrainConfig, machine: Machine, **settings: Any) -> Forecast:
    """Forecasts the train step of a run. No data is opened, and no array is created.

    Usage:
      forecast_run(config, parse_machine('v5p:4x4x4')).fits

    Args:
      config: the settings of the run. Its mesh is moved to the machine.
      machine: the machine.
      **settings: as for `meshwright.forecast`. With `compile=False`, all figures are by formula,
        and come within seconds.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured there.
    """
    return forecast_step(plan_step(move_to(config, machine)), machine, **settings)


def plan_on(machine: Machine, make_config: Callable[[], TrainConfig]) -> PlannedStep:
    """Plans the train step of a run, and makes its settings for the machine.

    Args:
      machine: the machine.
      make_config: makes the settings, such as `train.gin.find_config`. It finds the devices of the
        machine in place of the devices of this computer.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured there.
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

    Args:
      planned: the step.
      machine: the machine.
      **settings: as for `meshwright.forecast`.
    """
    return forecast(
        planned.run.config.partitioner,
        planned.step,
        *planned.arguments,
        topology=machine.topology if machine.on_cpu else None,
        on_cpu=machine.on_cpu,
        **settings,
    )
