"""Forecasts of runs: their train step on machines that are not here, without data."""

from train.planning.forecasting.machines import (
    Machine as Machine,
    NotInstalledError as NotInstalledError,
    check_compilers as check_compilers,
    move_to as move_to,
    parse_machine as parse_machine,
    stand_in as stand_in,
)
from train.planning.forecasting.runs import (
    Progress as Progress,
    forecast_run as forecast_run,
    forecast_step as forecast_step,
    plan_on as plan_on,
)
from train.planning.forecasting.step import (
    PlannedStep as PlannedStep,
    plan_step as plan_step,
)
