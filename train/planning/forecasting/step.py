"""The train step of a run on a machine that is not here, without data and without arrays."""

from __future__ import annotations

from typing import NamedTuple

from partitioning.programs import PartitionedCallable
from train.config import TrainConfig
from train.errors import ConfigError
from train.objectives import TokenLoss
from train.running.programs import partition_train_step
from train.running.run import PlannedRun, check_vocabulary, plan_run


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
