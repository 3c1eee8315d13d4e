"""Compiled programs, also for machines that are not here: what they cost on each device.

`hlo_text` parses the text of a program, and `visits` lists what it runs and how often.
`device_groups` knows which devices exchange data. `collectives` and `operations` find what a
program exchanges and computes, `peak_memory` which arrays fill the memory, and `costs` puts it
together.
"""

from partitioning.aot.collectives import (
    Collective as Collective,
    MeshAxes as MeshAxes,
)
from partitioning.aot.costs import (
    MemoryUse as MemoryUse,
    ProgramCosts as ProgramCosts,
    costs_of_text as costs_of_text,
    mesh_axes as mesh_axes,
    read_costs as read_costs,
)
from partitioning.aot.operations import (
    Kernel as Kernel,
    Operation as Operation,
)
from partitioning.aot.peak_memory import (
    LiveArray as LiveArray,
    PeakMemory as PeakMemory,
)
