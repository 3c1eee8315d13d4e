"""T5X's `gin_utils`: how a run writes its configuration."""

from __future__ import annotations

from typing import Any

from train.t5x.refusals import refusal


def summarize_gin_config(
    model_dir: str | None = None, summary_writer: Any = None, step: int = 0
) -> None:
    """Stands for writing the configuration. Every run writes it to `<model_dir>/config.gin`."""


def check_summarize(key: str, function: Any) -> None:
    """Checks that `summarize_config_fn` is `summarize_gin_config` or None.

    Raises:
      ConfigError: if it is another function.
    """
    if function is not None and getattr(function, '__name__', '') != summarize_gin_config.__name__:
        why = 'every run writes its configuration to config.gin; use '
        raise refusal(key, function, why + '@gin_utils.summarize_gin_config')
