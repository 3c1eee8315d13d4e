"""A task in the form that a model or an evaluator needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from train.data.rows.pair_tasks import Architecture, PairTask
from train.data.rows.subset import Subset
from train.data.rows.tasks import Mixture, Task


def adapt(
    task: Task,
    *,
    architecture: Architecture | None = None,
    pack: bool | None = None,
    cut: bool | None = None,
) -> Any:
    """Changes how inputs and targets become rows, in every part of a mixture.

    Args:
      task: the task. Tasks without inputs and targets stay as they are.
      architecture: the kind of model that reads the rows. None keeps it.
      pack: whether a row may hold several examples. None keeps it.
      cut: whether longer texts are cut to the lengths of rows. None keeps it.
    """
    given = {'architecture': architecture, 'pack': pack, 'cut': cut}

    def change(part: Any) -> Any:
        if not isinstance(part, PairTask):
            return part
        changes: dict[str, Any] = {
            k: v for k, v in given.items() if v is not None and hasattr(part, k)
        }
        return dataclasses.replace(part, **changes)

    return map_parts(change, task)


def map_parts(change: Callable[[Any], Any], task: Task) -> Any:
    """The task with every part of its mixtures changed."""
    if isinstance(task, Mixture):
        return dataclasses.replace(task, tasks=[map_parts(change, part) for part in task.tasks])
    if isinstance(task, Subset):
        return dataclasses.replace(task, task=map_parts(change, task.task))
    return change(task)
