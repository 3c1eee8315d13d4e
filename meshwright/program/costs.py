"""What a compiled program costs on each device: memory, computation, and exchanged bytes."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.program.collectives import Collective, MeshAxes, find_collectives
from meshwright.program.hlo_text import parse_hlo
from meshwright.program.operations import Kernel, Operation, find_kernels, find_operations
from meshwright.program.peak_memory import PeakMemory, find_peak
from meshwright.program.traffic import find_traffic
from meshwright.program.visits import visit_program
from partitioning.hardware import CHIPS, chip_of, slice_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of a program on each device, in bytes, as the compiler plans it.

    Attributes:
      peak: the most that is in use at any time.
      arguments: the arguments, such as the state and the batch.
      outputs: the results.
      aliased: the part of the results that takes the place of donated arguments.
      temporaries: the memory for all else. With the arguments it can exceed the peak, because parts
        of it are in use at different times.
      program: the program itself.
    """

    peak: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCosts:
    """What a compiled program costs on each device, from the compiler.

    Attributes:
      memory: the memory, or None if only the program's text was read.
      at_peak: the arrays that are in memory when it is fullest, estimated from the text.
      chip: the name of the chip in `partitioning.hardware.CHIPS`, or None for others.
      cycles: the compiler's estimate for all operations that have one. It covers no collectives, no
        copies between memories and no kernels, and exists for TPUs only.
      compute_seconds: `cycles` at the chip's clock, or None if there is no estimate.
      operations: the operations with an estimate, by kind and line; those with the most cycles
        first.
      kernels: the kernels, which have no estimate.
      collectives: the exchanges of data, in the order in which they run.
      device_bytes: what operations other than matrix products, kernels and exchanges read and write
        in the memory of the device, in bytes.
      host_bytes: what is copied between the memories of the device and of the host, in bytes.
    """

    memory: MemoryUse | None
    at_peak: PeakMemory
    chip: str | None
    cycles: int
    compute_seconds: float | None
    operations: tuple[Operation, ...]
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    device_bytes: float = 0.0
    host_bytes: float = 0.0

    def wire_bytes(self, network: str = 'ici') -> float:
        """The bytes that a device sends over a network in one call: 'ici' or 'dcn'."""
        return sum(c.total_bytes for c in self.collectives if c.network == network)

    def wire_table(self) -> dict[tuple[str, tuple[str, ...], str], float]:
        """The bytes that a device sends in one call, by network, mesh axes and kind."""
        table: dict[tuple[str, tuple[str, ...], str], float] = collections.defaultdict(float)
        for c in self.collectives:
            table[c.network, c.axes, c.kind] += c.total_bytes
        return dict(sorted(table.items(), key=lambda item: -item[1]))


def read_costs(
    compiled: jax.stages.Compiled, mesh: Mesh, slices: Mapping[str, int] | None = None
) -> ProgramCosts:
    """Reads the costs of a compiled program.

    Args:
      compiled: the result of `jitted.lower(...).compile()`, for devices that may not be here.
      mesh: the mesh that it was compiled for.
      slices: the number of slices along axes that span several, if its devices do not show it.

    Raises:
      ValueError: if jaxlib cannot read what a newer compiler has made.
    """
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    axes = mesh_axes(mesh)
    axes = dataclasses.replace(axes, slices=axes.slices or slices or {})
    costs = costs_of_text(read_text(compiled), mesh=axes, chip=chip.name if chip else None)
    return dataclasses.replace(costs, memory=read_memory(compiled, device.platform))


def costs_of_text(
    text: str, *, mesh: MeshAxes | None = None, chip: str | None = None
) -> ProgramCosts:
    """Reads the costs of a program from its text, except its memory.

    Args:
      text: `compiled.as_text()`.
      mesh: the axes of the mesh that the program was compiled for.
      chip: the name of the chip in `partitioning.hardware.CHIPS`.

    Raises:
      ValueError: if the text is not a compiled program.
    """
    program = parse_hlo(text)
    visits = visit_program(program)
    operations = find_operations(program, visits)
    cycles = sum(operation.cycles for operation in operations)
    clock = CHIPS[chip].clock_hz if chip else None
    device_bytes, host_bytes = find_traffic(program, visits)
    return ProgramCosts(
        memory=None,
        at_peak=find_peak(program),
        chip=chip,
        cycles=cycles,
        compute_seconds=cycles / clock if clock and cycles else None,
        operations=operations,
        kernels=find_kernels(program, visits),
        collectives=find_collectives(program, visits, mesh),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )


def read_memory(compiled: jax.stages.Compiled, platform: str) -> MemoryUse | None:
    """Reads the compiler's plan of the memory, or None if it has none."""
    sizes: Any = compiled.memory_analysis()
    if sizes is None:
        return None
    arguments, outputs = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
    aliased, temporaries = sizes.alias_size_in_bytes, sizes.temp_size_in_bytes
    # On CPUs the compiler's peak counts only a part of the program; on TPUs it counts what the
    # program keeps in the memory of the host, too.
    sum_of_parts = arguments + outputs - aliased + temporaries
    peak = min(sum_of_parts, sizes.peak_memory_in_bytes)
    return MemoryUse(
        peak=sum_of_parts if platform == 'cpu' else peak,
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        program=sizes.generated_code_size_in_bytes,
    )


def mesh_axes(mesh: Mesh) -> MeshAxes:
    """Returns the sizes of the axes of a mesh, and those that span several slices."""
    slices = np.vectorize(slice_of, otypes=[int])(mesh.devices)
    first = (0,) * slices.ndim
    spans = {}
    for i, name in enumerate(mesh.axis_names):
        line = slices[(*first[:i], slice(None), *first[i + 1 :])]
        if (count := len(set(line.tolist()))) > 1:
            spans[str(name)] = count
    return MeshAxes(sizes=dict(mesh.shape), slices=spans)


# The texts of programs that are in use: writing one takes a compiler long.
_TEXTS: weakref.WeakKeyDictionary[jax.stages.Compiled, str] = weakref.WeakKeyDictionary()


def read_text(compiled: jax.stages.Compiled) -> str:
    """Returns the text of a compiled program, or '' if its back end has none.

    Args:
      compiled: the result of `jitted.lower(...).compile()`.

    Raises:
      ValueError: if the compiler, such as libtpu, is newer than jaxlib and has used an
        instruction in a form that jaxlib does not know.
    """
    if compiled in _TEXTS:
        return _TEXTS[compiled]
    try:
        return _TEXTS.setdefault(compiled, compiled.as_text() or '')
    except jax.errors.JaxRuntimeError as error:
        version, reason = metadata.version('jaxlib'), str(error).splitlines()[0]
        raise ValueError(
            f'the program is compiled, but jaxlib {version} cannot read it: install a newer jax '
            f'and jaxlib, or an older compiler, such as libtpu ({reason})'
        ) from error
