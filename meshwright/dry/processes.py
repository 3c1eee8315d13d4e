"""Answers for the other processes of a healthy run, if the machine is only described."""

from __future__ import annotations

from typing import Any


class Processes:
    """The client through which processes exchange texts and wait for one another.

    It knows what this process has told it. No process is late.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def wait_at_barrier(self, *args: Any, **kwargs: Any) -> None:
        """All other processes are there."""

    def key_value_set(self, key: str, value: Any, allow_overwrite: bool = False) -> None:
        """Keeps a text."""
        self._values[key] = value

    def key_value_delete(self, key: str) -> None:
        """Forgets a text, and those whose keys begin like it."""
        for name in [name for name in self._values if name.startswith(key)]:
            del self._values[name]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, Any]]:
        """The texts whose keys begin like this."""
        return [pair for pair in self._values.items() if pair[0].startswith(prefix)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int = 0) -> Any:
        """A text; empty if another process would have told it."""
        return self._values.get(key, '')

    def key_value_try_get(self, key: str) -> Any:
        """A text; empty if another process would have told it."""
        return self._values.get(key, '')

    def key_value_increment(self, key: str, increment: int) -> int:
        """Adds to a number, and returns it."""
        self._values[key] = int(self._values.get(key, 0)) + increment
        return self._values[key]

    def get_live_nodes(self, nodes: Any) -> dict[int, int]:
        """All processes live."""
        return dict.fromkeys(nodes, 0)

    key_value_set_bytes = key_value_set
    key_value_dir_get_bytes = key_value_dir_get
    blocking_key_value_get_bytes = blocking_key_value_get
