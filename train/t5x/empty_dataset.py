"""The empty folder `dataset` of T5X's checkpoints. Here, the step determines the next row."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp
from etils import epath


class EmptyDatasetHandler(ocp.CheckpointHandler):
    """Writes and reads nothing, so that the folder of the item stays empty."""

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        """Leaves the folder empty."""

    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        """Reads nothing."""


@ocp.args.register_with_handler(EmptyDatasetHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class EmptyDataset(ocp.args.CheckpointArgs):
    """The item without content."""
