"""How long the processes of a run wait for each other."""

from __future__ import annotations

import dataclasses

from train.errors import check_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the processes of a run wait for each other, in seconds.

    Attributes:
      init_seconds: for all processes to start.
      heartbeat_seconds: for a sign of life of a process, which it gives even while it compiles.
      watchdog_seconds: for a sign of progress of a process for which others wait.
    """

    init_seconds: float = 60.0
    heartbeat_seconds: float = 30.0
    watchdog_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_seconds(**{f'--{name}': value for name, value in vars(self).items()})

    @property
    def beat_seconds(self) -> float:
        """The time between two signs of life."""
        return min(1.0, self.heartbeat_seconds / 10)
