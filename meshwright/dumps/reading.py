"""Reads a dump: a folder of `--xla_dump_to`, or one text of HLO or StableHLO."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.dumps import hlo_module
from meshwright.dumps.buffer_assignment import read_buffer_assignment
from meshwright.dumps.folder import DumpedModule, Stage, choose_module, list_modules
from meshwright.dumps.mesh_sizes import check_mesh, find_mesh, infer_mesh, over_slices
from meshwright.dumps.program import DumpedProgram
from meshwright.dumps.stablehlo import parse_stablehlo
from meshwright.dumps.texts import read_text
from meshwright.program.collectives import Collective, MeshAxes
from meshwright.program.costs import MemoryUse
from partitioning.hardware import CHIPS, Chip
from partitioning.rules import nearest

_TILED = re.compile(r'\{[\d,]*:[^}]*T\(\d')  # only layouts for TPUs have tiles
_OF_GPUS = ('gpu_backend_config', '"operation_queue_id"', 'fingerprint_before_lhs')
_CONSTRAINT = re.compile(r'custom_call_target="(?:Sharding|xla\.sdy\.ShardingConstraint)"')
_COMMENTS = re.compile(r'\A(?:\s*(?://[^\n]*\n)?)+')  # before the program
# What a text leads to that does not hold together, such as an instruction that calls itself, or a
# tile without a size. RuntimeError contains RecursionError.
_OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError)
_BEGINNINGS = ('module', '#loc', 'func.func', '#map', '//')


def read_dump(
    path: str | os.PathLike[str],
    *,
    module: str | None = None,
    mesh: Mapping[str, int] | None = None,
    chip: str | None = None,
) -> DumpedProgram:
    """Reads what a dump says about a program. Nothing is compiled, and no device is needed.

    Usage:
      program = read_dump('dump', mesh={'data': 4, 'model': 2})
      print(dump_table(program))

    Args:
      path: a folder that `--xla_dump_to` or `JAX_DUMP_IR_TO` has filled, or a text of HLO or
        StableHLO.
      module: the module of a folder, such as 'jit_step', 'step' or 'module_0012.jit_step'; by
        default the largest compiled one.
      mesh: the sizes of the mesh axes, in the order of the devices. By default, the mesh that the
        dump names is taken, or else one in which all exchanges go along axes.
      chip: the chip whose memory is compared with the peak, such as 'v5e'.

    Raises:
      ValueError: if there is no program at the path, if the text is cut off, if the module or the
        chip does not exist, if the chip is for another back end, or if the mesh has another number
        of devices.
    """
    path = Path(path)
    modules: tuple[DumpedModule, ...] = ()
    if path.is_dir():
        modules = _list(path)
        one = choose_module(modules, module)
    elif module is not None:
        raise ValueError(f'{path} is one module: leave out --module={module}')
    else:
        one = _alone(path)
    text = _COMMENTS.sub('', read_text(one.file))
    try:
        return _read_program(text, one, modules, mesh, _find_chip(chip))
    except ValueError as error:
        raise ValueError(f'{one.file}: {error}') from error
    except _OF_DAMAGE as error:
        raise ValueError(
            f'{one.file}: the text cannot be read ({error!r}): it may be cut off or damaged'
        ) from error


def _read_program(
    text: str,
    one: DumpedModule,
    modules: Sequence[DumpedModule],
    sizes: Mapping[str, int] | None,
    chip: Chip | None,
) -> DumpedProgram:
    if text.startswith('HloModule'):
        made = _read_hlo(text, one, sizes, chip)
    elif text.lstrip().startswith(_BEGINNINGS) and ('func.func' in text or 'stablehlo' in text):
        made = _read_stablehlo(text, one, sizes, chip)
    else:
        raise ValueError(
            'neither HLO nor StableHLO: expected a text that begins with HloModule, or a module '
            'of StableHLO'
        )
    return dataclasses.replace(made, modules=tuple(modules))


def _read_hlo(
    text: str, one: DumpedModule, sizes: Mapping[str, int] | None, chip: Chip | None
) -> DumpedProgram:
    hlo = hlo_module.read_hlo(text)
    texts = [text, *([read_text(one.before)] if one.before else [])]
    mesh, mesh_from, num_devices = _find_mesh_of_hlo(hlo, texts, sizes)
    back_end = one.back_end or _back_end(text)
    _check_chip(chip, back_end)
    memory = None
    notes = list(_notes(hlo.stage, hlo_module.unknown_loops(hlo)))
    if hlo.stage == 'compiled':
        if one.buffers is not None:
            memory = _read_memory(one.buffers, one.live_ranges, back_end)
        else:
            notes.append(
                'the peak is estimated by live ranges, because there is no buffer assignment next '
                'to the program'
            )
    at_peak = hlo_module.peak_of(hlo)
    arguments = hlo_module.arguments_of(hlo, mesh) if hlo.stage == 'not partitioned' else ()
    held = sum(a.bytes_per_device for a in arguments) or hlo_module.arguments_bytes(hlo)
    return DumpedProgram(
        name=hlo.name,
        file=one.file,
        language='HLO',
        stage=hlo.stage,
        back_end=back_end,
        num_devices=num_devices,
        mesh=mesh,
        mesh_from=mesh_from,
        memory=memory,
        arguments_bytes=memory.arguments if memory else held,
        live=at_peak.nbytes if at_peak else None,
        buffers=at_peak.arrays if at_peak else (),
        collectives=_sorted(hlo_module.exchanges_of(hlo, mesh)),
        arguments=arguments,
        constraints=len(_CONSTRAINT.findall(text)) if arguments else 0,
        chip=chip,
        notes=tuple(notes),
    )


def _read_stablehlo(
    text: str, one: DumpedModule, sizes: Mapping[str, int] | None, chip: Chip | None
) -> DumpedProgram:
    named = find_mesh([text])
    counted = parse_stablehlo(text, named)
    num_devices = counted.num_devices
    if num_devices == 1 and named is not None:
        num_devices = _size(named)
    mesh, mesh_from = _find_mesh([text], sizes, num_devices)
    program = counted if mesh == named else parse_stablehlo(text, mesh)
    notes = list(_notes('not partitioned', program.unknown_loops))
    if program.of_shardy:
        notes.append(
            f'{program.of_shardy:,} exchanges of a stage of Shardy (sdy.all_gather, ...) are not '
            'counted: read the module after_optimizations'
        )
    if program.partly_manual:
        notes.append(
            'exchanges of a shard_map over some of the mesh axes are counted as if their arrays '
            'were whole along the others'
        )
    return DumpedProgram(
        name=program.name.removeprefix('@'),
        file=one.file,
        language='StableHLO',
        stage='not partitioned',
        back_end='',
        num_devices=num_devices,
        mesh=mesh,
        mesh_from=mesh_from,
        memory=None,
        arguments_bytes=sum(a.bytes_per_device for a in program.arguments),
        live=None,
        buffers=(),
        collectives=_sorted(program.collectives),
        arguments=program.arguments,
        constraints=program.constraints,
        chip=chip,
        notes=tuple(notes),
    )


def _find_mesh_of_hlo(
    hlo: hlo_module.Hlo, texts: Sequence[str], sizes: Mapping[str, int] | None
) -> tuple[MeshAxes | None, str, int]:
    """The mesh of a module, where it is from, and the number of devices of all slices.

    A module for several slices is the program of one of them.
    """
    of_slice, slices = hlo.program.num_devices, hlo_module.count_slices(hlo)
    named = find_mesh(texts)
    if of_slice == 1 and hlo.stage == 'not partitioned' and named is not None:
        of_slice = _size(named)  # jax leaves the number out of what it has lowered
    wanted = named if sizes is None else MeshAxes(sizes=sizes)
    if slices > 1 and wanted is not None and _size(wanted) % of_slice == 0:
        slices = max(slices, _size(wanted) // of_slice)
    num_devices = of_slice * slices
    mesh, mesh_from = _find_mesh(texts, sizes, num_devices)
    if mesh is not None and slices > 1:
        mesh = over_slices(mesh, of_slice)
    if mesh is None:
        mesh = infer_mesh(hlo_module.groups_of(hlo), of_slice)
        mesh_from = 'groups of devices' if mesh else ''
    return mesh, mesh_from, num_devices


def _find_mesh(
    texts: Sequence[str], sizes: Mapping[str, int] | None, num_devices: int
) -> tuple[MeshAxes | None, str]:
    """The mesh that was given or that texts name, and where it is from."""
    if sizes is not None:
        return check_mesh(sizes, num_devices), 'given'
    named = find_mesh(texts, num_devices)
    return named, 'the dump' if named else ''


def _read_memory(buffers: Path, live_ranges: Path | None, back_end: str) -> MemoryUse:
    """The memory of a program. As in forecasts, the peak on CPUs is all that is reserved."""
    ranges = '' if live_ranges is None or back_end == 'cpu' else read_text(live_ranges)
    return read_buffer_assignment(read_text(buffers), ranges)


def _size(mesh: MeshAxes) -> int:
    return math.prod(mesh.sizes.values())


def _sorted(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    return tuple(sorted(collectives, key=lambda c: (-c.total_bytes, c.kind, c.instruction)))


def _notes(stage: Stage, unknown_loops: int) -> Iterator[str]:
    if stage == 'partitioned':
        yield (
            'the compiler joins and changes exchanges after this stage, and decides the memory '
            'later: read the module after_optimizations for these'
        )
    if unknown_loops:
        loops = 'a loop' if unknown_loops == 1 else f'{unknown_loops} loops'
        yield f'the text does not tell the length of {loops} with exchanges: these count once'


def _back_end(text: str) -> str:
    """The back end that a program was compiled for, from what only its compiler writes."""
    if 'is_scheduled=true' not in text.partition('\n')[0]:
        return ''
    if _TILED.search(text):
        return 'tpu'
    return 'gpu' if any(word in text for word in _OF_GPUS) else ''


def _find_chip(name: str | None) -> Chip | None:
    if name is None:
        return None
    if name not in CHIPS:
        raise ValueError(
            f'no chip {name!r}.{nearest(name, CHIPS)} The chips are {", ".join(CHIPS)}'
        )
    return CHIPS[name]


def _check_chip(chip: Chip | None, back_end: str) -> None:
    """Raises a ValueError if a program was compiled for another back end than a chip has."""
    if chip is not None and back_end and chip.platform != back_end:
        raise ValueError(
            f'the program was compiled for a {back_end.upper()}, and {chip.name} is a '
            f'{chip.platform.upper()}: leave out the chip, or dump the program where it is '
            f'compiled for {chip.name}'
        )


def _list(folder: Path) -> tuple[DumpedModule, ...]:
    try:
        return list_modules(folder)
    except OSError as error:
        raise ValueError(f'{folder} cannot be read: {error.strerror}') from error


def _alone(file: Path) -> DumpedModule:
    """A module whose file was named, with the files next to it that XLA has written."""
    if not file.exists():
        raise ValueError(f'{file} does not exist: name a folder of --xla_dump_to, or a text')
    if file.parent.is_dir():
        for module in _siblings(file):
            if file.name.startswith(f'{module.name}.'):
                is_same = module.file.name == file.name
                return module if is_same else dataclasses.replace(module, file=file, buffers=None)
    return DumpedModule(
        name=file.stem,
        function=file.stem,
        stage='not partitioned',
        back_end='',
        file=file,
        before=None,
        buffers=None,
        live_ranges=None,
        nbytes=0,
    )


def _siblings(file: Path) -> tuple[DumpedModule, ...]:
    try:
        return list_modules(file.parent)
    except (OSError, ValueError):
        return ()
