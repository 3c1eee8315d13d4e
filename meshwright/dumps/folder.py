"""The modules in a folder that `--xla_dump_to` or `JAX_DUMP_IR_TO` has filled."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from partitioning.rules import nearest

Stage = Literal['compiled', 'partitioned', 'not partitioned']

# Files of XLA: module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt, and on TPUs
# module_0001.jit_step.cl_1014260217.after_optimizations.txt.
_AFTER = re.compile(
    r'(?P<module>module_\d+\.(?P<name>.+?))\.'
    r'(?:(?P<cpu>cpu_)|[\w.]*(?P<gpu>gpu_)|(?:cl_\d+\.)?)after_optimizations\.txt'
)
_PARTITIONED = re.compile(r'(?P<module>module_\d+\.(?P<name>.+?))\..*after_spmd_partitioner\.txt')
_BEFORE = re.compile(
    r'(?P<module>module_\d+\.(?P<name>.+?))\.(?:cl_\d+\.)?before_optimizations\.txt'
)
# Files of jax: jax_ir0003_jit_step_compile.mlir. Shardy's stages have other names.
_OF_JAX = re.compile(r'(?P<module>(?:jax_ir\d+_)?(?P<name>[\w.\-]+?)(?:_compile)?)\.mlir')
_STAGES: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (_AFTER, 'compiled'),
    (_PARTITIONED, 'partitioned'),
    (_BEFORE, 'not partitioned'),
    (_OF_JAX, 'not partitioned'),
)
_LISTED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpedModule:
    """A module of a folder.

    Attributes:
      name: the name with its number, 'module_0001.jit_step'.
      function: the name without its number, 'jit_step'.
      stage: how far its compilation is in `file`.
      back_end: 'cpu', 'gpu' or 'tpu', from the names of its files; '' if they do not tell.
      file: the text of the module at its last stage.
      before: its text before all optimizations, which has the mesh, if there is one.
      buffers: the text of its buffer assignment, if there is one.
      live_ranges: the text with the live ranges of its values, if there is one.
      nbytes: the size of `file`, in bytes.
    """

    name: str
    function: str
    stage: Stage
    back_end: str
    file: Path
    before: Path | None
    buffers: Path | None
    live_ranges: Path | None
    nbytes: int


def list_modules(folder: Path) -> tuple[DumpedModule, ...]:
    """Returns the modules of a folder: the compiled ones first, and the largest of these first.

    Raises:
      ValueError: if the folder has no text of a module.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    found: dict[str, DumpedModule] = {}
    for pattern, stage in _STAGES:
        for file in files:
            match = pattern.fullmatch(file.name)
            if match is not None and match['module'] not in found:
                found[match['module']] = _module(file, match, stage, files)
    if not found:
        raise ValueError(_why_empty(folder, files))
    order = [stage for _, stage in _STAGES]
    return tuple(sorted(found.values(), key=lambda m: (order.index(m.stage), -m.nbytes, m.name)))


def choose_module(modules: Sequence[DumpedModule], name: str | None) -> DumpedModule:
    """Returns the module with a name, with or without its number, or the first one.

    If several modules have a name without a number, the first of them is returned.

    Raises:
      ValueError: if no module has the name.
    """
    if name is None:
        return modules[0]
    for module in modules:
        short = module.function.removeprefix('jit_')
        if name in (module.name, module.function, short):
            return module
    names = tuple(dict.fromkeys(module.function for module in modules))
    more = f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''
    raise ValueError(
        f'no module {name!r}.{nearest(name, names)} There are {", ".join(names[:_LISTED])}{more}'
    )


def _module(file: Path, match: re.Match[str], stage: Stage, files: Sequence[Path]) -> DumpedModule:
    name = match['module']
    own = [f for f in files if f.name.startswith(f'{name}.')]
    groups = match.groupdict()
    back_end = 'cpu' if groups.get('cpu') else 'gpu' if groups.get('gpu') else ''
    if not back_end and re.search(r'\.cl_\d+\.', file.name):
        back_end = 'tpu'
    return DumpedModule(
        name=name,
        function=match['name'],
        stage=stage,
        back_end=back_end,
        file=file,
        before=next((f for f in own if _BEFORE.fullmatch(f.name) and f != file), None),
        buffers=next((f for f in own if f.name == f'{file.stem}-buffer-assignment.txt'), None),
        live_ranges=next((f for f in own if f.name == f'{file.stem}-live-range.txt'), None),
        nbytes=file.stat().st_size,
    )


def _why_empty(folder: Path, files: Sequence[Path]) -> str:
    if not any(folder.iterdir()):
        return f'{folder} is empty: run the program with XLA_FLAGS=--xla_dump_to={folder}'
    suffixes = {file.suffix for file in files}
    if '.pb' in suffixes:
        return (
            f'{folder} has only binary modules (.pb): dump the text, too, with '
            '--xla_dump_hlo_as_text'
        )
    if not files:
        folders = ', '.join(sorted(p.name for p in folder.iterdir())[:_LISTED])
        return f'{folder} has no files, only folders: name one of them ({folders})'
    shown = ', '.join(file.name for file in files[:3])
    return (
        f'{folder} has no module: expected files such as module_0001.jit_step.'
        f'cpu_after_optimizations.txt, and found {len(files):,} others ({shown})'
    )
