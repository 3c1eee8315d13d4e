"""What the processes of a run do together: they fail, compare and decide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from train.errors import ConfigError, first_line

MAX_MESSAGE_BYTES = 1000


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Raises an error on every process if the body fails on any of them.

    Without it, the other processes would wait forever for the one that failed. All processes must
    enter the context together. The body must not contain anything that waits for other processes.

    Raises:
      Exception: the body's own error, on the processes where it failed.
      ConfigError: on the other processes, with the first process that failed and its message. It is
        of the same type if that error is a ConfigError.
    """
    if jax.process_count() == 1:
        yield
        return
    from jax.experimental import multihost_utils

    message: bytes = b''
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # Any error must reach the other processes.
        message, failure = f'{type(error).__name__}\n{first_line(error)}'.encode(), error
    padded = np.zeros(MAX_MESSAGE_BYTES, np.uint8)
    padded[: len(message)] = np.frombuffer(message[:MAX_MESSAGE_BYTES], np.uint8)
    messages = np.asarray(multihost_utils.process_allgather(padded))
    if failure is not None:
        raise failure
    for process in np.flatnonzero(messages.any(axis=1)).tolist():
        text = messages[process].tobytes().rstrip(b'\0').decode(errors='replace')
        name, _, line = text.partition('\n')
        raise _config_error(name)(f'process {process} failed: {line}')


def _config_error(name: str) -> type[ConfigError]:
    """The type of ConfigError that has a name, or ConfigError itself."""
    types = [ConfigError]
    for kind in types:  # It grows by the types that are found.
        types += kind.__subclasses__()
    return next((kind for kind in types if kind.__name__ == name), ConfigError)


def check_same_step(step: int) -> None:
    """Checks that all processes start from the same step. All of them must call it together.

    Raises:
      ConfigError: if they differ, with the step of each process.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    steps = np.asarray(multihost_utils.process_allgather(np.int32(step))).tolist()
    if len(set(steps)) > 1:
        raise ConfigError(
            f'the processes found checkpoints of different steps: {steps}, in the order of the '
            'processes (0 means none). MODEL_DIR must be on storage that all hosts share'
        )


def agree_on(value: Any) -> Any:
    """Returns the value of process 0, a number. All processes must call it together."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(value)


def any_process(condition: bool) -> bool:
    """Whether a condition holds on any process. All processes must call it together."""
    if jax.process_count() == 1:
        return condition
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.bool_(condition))).any())
