"""Runs of the shipped configurations on described machines, which benchmarks share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShippedRun:
    """A run of shipped gin files.

    Attributes:
      name: the name in results and on the command line.
      model: the file in configs/models.
      preset: the file in configs/partitioning.
      topology: the described machine.
      batch: the number of sequences of a step.
      bindings: gin bindings.
    """

    name: str
    model: str
    preset: str = 'fsdp'
    topology: str
    batch: int
    bindings: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        """The gin files, in their order."""
        names = ('runs/pretrain', f'models/{self.model}', f'partitioning/{self.preset}')
        return [f'configs/{name}.gin' for name in (*names, 'runs/forecast')]

    @property
    def all_bindings(self) -> list[str]:
        """The gin bindings, with bindings of the machine and the batch."""
        return [f"TOPOLOGY = '{self.topology}'", f'BATCH_SIZE = {self.batch}', *self.bindings]
