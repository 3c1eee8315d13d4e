"""Ends a compilation when the scheduled text of a program and its memory are known.

Most of the time of a compilation for TPUs is the generation of code, which adds only the estimated
cycles of the operations.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Files that the compiler writes about a module if it is asked to.
_ALL_TEXT = '*{}*after_optimizations_after_buffer_assignment.txt'
_TOO_LARGE = '*{}*oom_intermediate_module.txt'  # the scheduled text of a program that does not fit
_MEMORY = '*{}*after_optimizations-memory-usage-report.txt'
_BUFFERS = '*{}*after_optimizations-buffer-assignment.txt'
_ARGUMENT = re.compile(r'^allocation \d+: size (\d+), page 0, parameter', re.MULTILINE)


def ask_for_text(module: str = 'jit_train_step') -> Path:
    """Asks the compiler to write what it knows about modules whose names have this part.

    Call it before jax runs.

    The result is the folder that it writes to.
    """
    folder = Path(tempfile.mkdtemp(prefix='early-'))
    flags = f'--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={module}'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags}'.strip()
    return folder


def compile_until_scheduled(
    compile_now: Callable[[], Any],
    folder: Path,
    finish: Callable[[str, dict[str, int]], None],
    module: str = 'jit_train_step',
    too_large: bool = False,
) -> None:
    """Compiles a program until its text is there, and ends this process.

    `folder` is the one of `ask_for_text`. `finish` receives the text, and the sizes in bytes of the
    memory; with `too_large` also of a program that needs more memory than there is. An error of the
    compiler is raised.
    """
    failed = threading.Event()

    def end(text: Path) -> None:
        status = 1
        try:
            report, buffers = (next(folder.glob(n.format(module))) for n in (_MEMORY, _BUFFERS))
            finish(text.read_text(), _sizes(report.read_text(), buffers.read_text()))
            status = 0
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # nothing can stop a compiler

    def watch() -> None:
        while not ((found := sorted(folder.glob(_ALL_TEXT.format(module)))) and _ends(found[0])):
            if failed.wait(0.3):
                return
        end(found[0])

    threading.Thread(target=watch, daemon=True).start()
    try:
        compile_now()
    except Exception:
        failed.set()
        if too_large and (found := sorted(folder.glob(_TOO_LARGE.format(module)))):
            end(found[0])
        raise
    threading.Event().wait(60)  # the text is there by now


def _ends(path: Path) -> bool:
    """Whether a text is complete: its last line closes the entry computation."""
    with path.open('rb') as file:
        file.seek(max(0, path.stat().st_size - 100))
        return file.read().rstrip().endswith(b'}')


def _sizes(report: str, buffers: str) -> dict[str, int]:
    """The sizes of the memory of a device, as in `MemoryUse`."""
    _, _, space = report.partition('Memory Space: default (color=0)')
    total = re.search(r'Total bytes: (\d+)', space)
    assert total is not None, report[:200]
    arguments = sum(map(int, _ARGUMENT.findall(buffers)))
    return {'peak': int(total[1]), 'arguments': arguments, 'temporaries': int(total[1]) - arguments}
