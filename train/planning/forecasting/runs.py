"""The forecast of a run on a machine that is not here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.forecasting import forecast
from meshwright.remedies import Alternative
from meshwright.report.forecast import Forecast
from train.config import TrainConfig
from train.errors import ConfigError
from train.planning.forecasting.machines import Machine, move_to, stand_in
from train.planning.forecasting.step import PlannedStep, plan_step

# Receives a text when a stage begins.
Progress = Callable[[str], None]


def forecast_run(
    config: TrainConfig,
    machine: Machine,
    *,
    compile: bool = True,
    progress: Progress | None = None,
) -> Forecast:
    """Forecasts the train step of a run. No data is opened, and no array is created.

    Usage:
      forecast_run(config, parse_machine('v5p:4x4x4')).fits

    Args:
      config: the settings of the run. Its mesh is moved to the machine.
      machine: the machine.
      compile: whether to compile. Without, all figures are by formula, and come within seconds.
      progress: receives a text when a stage begins.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured there.
    """
    planned = plan_step(move_to(config, machine))
    return forecast_step(planned, machine, compile=compile, progress=progress)


def plan_on(machine: Machine, make_config: Callable[[], TrainConfig]) -> PlannedStep:
    """Plans the train step of a run whose settings are made for the machine.

    Args:
      machine: the machine.
      make_config: makes the settings, such as `train.gin.find_config`. Whatever in them
        depends on the devices of this computer depends on those of the machine instead.

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


def forecast_step(
    planned: PlannedStep,
    machine: Machine,
    *,
    compile: bool = True,
    alternatives: Sequence[Alternative] | None = (),
    confirm: bool = False,
    explain: bool = True,
    on_program: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Forecasts a planned train step on the machine that it was planned for.

    Args:
      planned: the step.
      machine: the machine.
      compile, alternatives, confirm, explain, on_program: as for `meshwright.forecast`.
      progress: as for `forecast_run`.
    """
    return forecast(
        planned.run.config.partitioner,
        planned.step,
        *planned.arguments,
        topology=machine.topology if machine.on_cpu else None,
        on_cpu=machine.on_cpu,
        compile=compile,
        alternatives=alternatives,
        confirm=confirm,
        explain=explain,
        on_program=on_program,
        progress=progress,
    )
