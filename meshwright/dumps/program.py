"""What was read from a dump about one program."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from meshwright.dumps.folder import DumpedModule, Stage
from meshwright.dumps.shardings import ShardedArray
from meshwright.program.collectives import Collective, MeshAxes
from meshwright.program.costs import MemoryUse
from meshwright.program.peak_memory import LiveArray
from partitioning.hardware import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpedProgram:
    """A program in a dump. Figures are per device and call.

    `dump_table(program)` is its text.

    Attributes:
      name: the name of its module.
      file: the file that was read.
      language: 'HLO' or 'StableHLO'.
      stage: how far it is compiled: 'compiled', 'partitioned', which is before most optimizations,
        or 'not partitioned'.
      back_end: 'cpu', 'gpu' or 'tpu'; '' if the dump does not tell.
      num_devices: the number of devices that run it.
      mesh: its mesh, or None if it is not known.
      mesh_from: 'given', 'the dump', 'groups of devices', or ''.
      memory: the memory from the buffer assignment, or None if the dump has none.
      arguments_bytes: the size of the arguments, in bytes.
      live: the size of the arguments and of the arrays that are live at the peak, by live ranges,
        in bytes; None if the program is not scheduled.
      buffers: the arrays that are live at the peak besides the arguments, the largest first.
      collectives: the exchanges of data, those with the most bytes first. Before partitioning, only
        those that the program itself asks for, in `shard_map` or `pmap`.
      arguments: the arguments and their layouts, before partitioning.
      constraints: the number of constraints of layouts, before partitioning.
      chip: the chip whose memory is compared, if it was given.
      notes: what is not exact.
      modules: all modules of the folder; empty for a single file.
    """

    name: str
    file: Path
    language: str
    stage: Stage
    back_end: str
    num_devices: int
    mesh: MeshAxes | None
    mesh_from: str
    memory: MemoryUse | None
    arguments_bytes: int
    live: int | None
    buffers: tuple[LiveArray, ...]
    collectives: tuple[Collective, ...]
    arguments: tuple[ShardedArray, ...] = ()
    constraints: int = 0
    chip: Chip | None = None
    notes: tuple[str, ...] = ()
    modules: tuple[DumpedModule, ...] = ()

    @property
    def peak(self) -> int | None:
        """The most memory that is in use, in bytes; None if the program is not compiled."""
        return self.live if self.memory is None else self.memory.peak

    @property
    def limit(self) -> int | None:
        """What a program can use on a device, in bytes; None if no chip was given."""
        return None if self.chip is None else self.chip.hbm_bytes_per_device

    @property
    def fits(self) -> bool | None:
        """Whether the peak is below the limit; None if one of them is not known."""
        if self.peak is None or self.limit is None:
            return None
        return self.peak <= self.limit
