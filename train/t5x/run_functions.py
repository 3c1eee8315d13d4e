"""The functions and classes of T5X's `utils` that its runs name, but that have one form here.

T5X's settings may name them, as their defaults do. Other functions in their place are refused, with
the exception of `verify_matching_vocabs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.t5x.refusals import refusal


class TrainStateInitializer:
    """Stands for the creation of the state: in its shards, or restored into them."""


def get_dataset(*args: Any, **kwargs: Any) -> None:
    """Stands for the opening of the training rows. It is never called."""


def get_training_eval_datasets(*args: Any, deterministic: bool = False, **kwargs: Any) -> None:
    """Stands for the opening of the rows to evaluate. It is never called.

    Args:
      args: has no effect.
      deterministic: has no effect; the order of the rows depends only on their seed.
      kwargs: has no effect.
    """


def prepare_train_iter(*args: Any, **kwargs: Any) -> None:
    """Stands for the reading of batches in advance. It is never called."""


def verify_matching_vocabs(cfg: Any, model: Any) -> None:
    """Checks that the task of a `DatasetConfig` has the vocabulary of the model."""
    model.check_vocabulary(cfg.evaluated_task(model))


# The settings of `train_script.train` that may name them, with the reason.
_ROWS = 'tasks of train.data make the rows'
STANDARD: Mapping[str, tuple[Any, str]] = {
    'get_dataset_fn': (get_dataset, _ROWS),
    'train_eval_get_dataset_fn': (get_training_eval_datasets, _ROWS),
    'prepare_train_iter_fn': (prepare_train_iter, 'train.data.Feed reads batches in advance'),
    'train_state_initializer_cls': (
        TrainStateInitializer,
        'parameters are created or restored on their own devices',
    ),
}


def check_standard(key: str, settings: Mapping[str, Any]) -> None:
    """Checks that the settings of `key` name T5X's own functions, or None."""
    for name, (standard, why) in STANDARD.items():
        value = settings.get(name)
        # gin wraps what its files set parameters of, so it is not always the same object.
        if value is not None and getattr(value, '__name__', '') != standard.__name__:
            written = f'use @utils.{standard.__name__} or leave it out'
            raise refusal(f'{key}.{name}', value, f'{why}; {written}')
