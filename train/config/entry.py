"""The entry point of a command: the one function that its gin files configure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gin

from train.errors import ConfigError

# (module, function). A module is considered only if a gin file has imported it.
ENTRY_POINTS = (
    ('train.train', 'train'),
    ('train.evaluation', 'evaluate_checkpoint'),
    ('train.t5x.train_script', 'train'),
    ('train.t5x.eval_script', 'evaluate'),
)


def find_entry() -> Callable[..., Any]:
    """Returns the entry point that the configuration sets parameters of, or `train.train`.

    Raises:
      ConfigError: if the configuration sets parameters of several entry points.
    """
    functions = [
        getattr(sys.modules[module], name) for module, name in ENTRY_POINTS if module in sys.modules
    ]
    configured = [function for function in functions if _has_settings(function)]
    if len(configured) > 1:
        names = ' and '.join(f'{one.__module__}.{one.__name__}' for one in configured)
        raise ConfigError(
            f'the gin files configure {names}, but a command runs only one of them: remove the '
            'settings of the others'
        )
    return gin.get_configurable((configured or functions)[0])


def _has_settings(function: Callable[..., Any]) -> bool:
    try:
        return bool(gin.get_bindings(function, resolve_references=False))
    except ValueError:  # gin does not know the function, so no gin file names it
        return False
