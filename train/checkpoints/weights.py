"""Folders of safetensors as checkpoints of parameters, from which a run can start."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from etils import epath

from train.checkpoints.arrays.stored import StoredArray, in_memory
from train.checkpoints.config import AVERAGES, RestoreConfig
from train.checkpoints.formats.safetensors_files import has_safetensors, open_safetensors
from train.checkpoints.huggingface import config_json
from train.checkpoints.huggingface.folders import open_parameters
from train.checkpoints.matching import Difference, Wanted
from train.checkpoints.reading import CheckpointReader

# The arrays of a state that are not taken, if a folder has them.
OTHERS = ('step', 'opt_state', AVERAGES)


def is_weights(path: epath.Path) -> bool:
    """Whether a path is a Hugging Face model, or another folder of safetensors."""
    return has_safetensors(path) or (path / config_json.FILE).exists()


class Weights(CheckpointReader):
    """A folder of safetensors, as a checkpoint of step 0 that has only parameters.

    With a `config.json`, it is a Hugging Face model, and its arrays get our names. Otherwise,
    they have them already. Floating-point arrays are converted to the dtype in which the run
    trains, because files often have bfloat16.
    """

    casts = True

    def __init__(self, folder: epath.Path, restore: RestoreConfig):
        self.directory, self._restore = folder, restore

    def path(self, step: int) -> epath.Path:
        """The folder, which has no steps."""
        return self.directory

    def newest_step(self, say: Callable[[str], None], below: int | None = None) -> int | None:
        """The step 0, which is the only one."""
        return None if below is not None else 0

    def first_step(self, step: int) -> int:
        """A run that starts from weights has not done any steps."""
        return 0

    def origin(self, step: int) -> str:
        """What is restored, for messages."""
        return (
            f'{self.directory}, which has only parameters: the steps begin at 0, with a new '
            'optimizer state'
        )

    def arrays(self, step: int, wanted: Wanted) -> dict[str, StoredArray]:
        """Opens the parameters under our names. An array that a run does not have keeps its own."""
        arrays = {'step': in_memory(np.int32(0))}
        if not (self.directory / config_json.FILE).exists():
            stored = open_safetensors(self.directory)
            return arrays | {n: x for n, x in stored.items() if not n.startswith(OTHERS)}
        return arrays | open_parameters(self.directory, wanted)

    def _match(
        self, step: int, by_name: Wanted, parts: tuple[str, ...], *, can_initialize: bool
    ) -> tuple[dict[str, StoredArray], list[Difference]]:
        """Finds the stored array of each parameter. The optimizer state is always new."""
        variables = {n: array for n, array in by_name.items() if n.startswith(self.variables)}
        return super()._match(step, variables, ('',), can_initialize=can_initialize)

    def close(self) -> None:
        """Does nothing: files are opened for each read."""
