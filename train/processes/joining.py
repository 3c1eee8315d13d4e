"""How the processes of a run find each other."""

from __future__ import annotations

import jax

from train.errors import ConfigError, first_line


def join_processes(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    auto_detect: bool,
) -> None:
    """Connects this process to the others of a run with several processes.

    Args:
      coordinator_address: host:port of process 0.
      process_count: the number of processes.
      process_index: the index of this process.
      auto_detect: whether jax reads the three from the environment (TPU pods, Slurm).

    Raises:
      ConfigError: if only some of the three are given, if the index is out of range, or if the
        processes cannot connect.
    """
    given = [x is not None for x in (coordinator_address, process_count, process_index)]
    if any(given) and not all(given):
        raise ConfigError(
            '--coordinator_address, --process_count and --process_index must be given together'
        )
    if process_count is not None and process_index not in range(process_count):
        raise ConfigError(
            f'--process_index={process_index} must be from 0 to {process_count - 1}, because '
            f'--process_count={process_count}'
        )
    if all(given) or auto_detect:
        try:
            jax.distributed.initialize(coordinator_address, process_count, process_index)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f'this process cannot connect to the others ({first_line(error)}): give '
                '--coordinator_address, --process_count and --process_index'
            ) from error
