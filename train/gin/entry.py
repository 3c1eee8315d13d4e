"""Finds what gin files configure: the function to call, the settings of a run, or its model."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import gin
from gin import config as gin_internals

from train.errors import ConfigError
from train.gin.aliases import NO_ALIASES, Aliases
from train.gin.load import configure
from train.gin.parsing import parse

ENTRY_POINTS = (
    'train.running.training.train',
    'train.running.evaluation.evaluate',
    'train.t5x.train_script.train',
    'train.t5x.train_script.precompile',
    'train.t5x.eval_script.evaluate',
    'train.t5x.infer_script.infer',
    'train.t5x.export_lib.save',
)


def find_entry() -> Callable[..., Any]:
    """Returns the entry point whose parameters the configuration sets, by default `train`.

    Raises:
      ConfigError: if the configuration sets parameters of several entry points.
    """
    bound = {selector for _, selector in gin_internals._CONFIG}
    configured = [name for name in ENTRY_POINTS if name in bound]
    if len(configured) > 1:
        raise ConfigError(
            f'the gin files configure {" and ".join(configured)}, but a command runs only one of '
            'them: remove the settings of the others'
        )
    return gin_internals._REGISTRY[(configured or ENTRY_POINTS)[0]].wrapper


def find_config() -> Any:
    """Returns the `TrainConfig` that the configuration describes, without starting the run.

    Raises:
      ConfigError: if the configuration does not describe a complete training run.
    """
    entry = find_entry()
    settings, name = gin.get_bindings(entry), f'{entry.__module__}.{entry.__name__}'
    if 'config' in settings:
        return settings['config']
    if name == ENTRY_POINTS[0]:
        raise ConfigError(
            'the gin files describe no run, and so no model: begin with a run, such as '
            'configs/runs/pretrain.gin, or write train.config = @TrainConfig()'
        )
    # A run with T5X's settings.
    translate = getattr(sys.modules[entry.__module__], 'translate', None)
    if translate is None:
        raise ConfigError(f'{name} is configured, which trains nothing')
    try:
        arguments = inspect.signature(entry).bind(**settings)
    except TypeError as error:
        raise ConfigError(f'{name}: {error}: set it in a gin file') from error
    arguments.apply_defaults()
    return translate(arguments.arguments)


def find_model(text: str, aliases: Aliases = NO_ALIASES) -> Any:
    """Returns the settings of the model that a gin file configures, without using devices or data.

    Args:
      text: the text of the file, for example of a run's `config.gin`.
      aliases: names of another system that it may use.

    Returns:
      The `config` of the model, or None if the file does not configure a model that has one.

    Raises:
      ConfigError: if the file is invalid.
    """
    configure(parse(text, 'config.gin'), aliases=aliases)
    settings = gin.get_bindings('train.config.TrainConfig', resolve_references=False)
    # When gin copies a reference, it calls the function that the reference names.
    objective = copy.deepcopy(settings.get('objective'))
    return getattr(getattr(objective, 'model', None), 'config', None)
