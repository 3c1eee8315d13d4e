"""What the compiler knows about a program before it generates code for it.

Code generation takes most of the time of a compilation, and adds only the estimated cycles of the
operations. The scheduled text and the memory are complete before, and are written by the compiler
if it is asked to. Programs that differ from another one only in the number of copies of the model
have the cycles of the other one, so they need no more than this.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TEXT = '*jit_train_step*after_optimizations_after_buffer_assignment.txt'
_REPORT = '*jit_train_step*after_optimizations-memory-usage-report.txt'
_BUFFERS = '*jit_train_step*after_optimizations-buffer-assignment.txt'
_ARGUMENT = re.compile(r'^allocation \d+: size (\d+), page 0, parameter', re.MULTILINE)


def ask_for_text() -> Path:
    """Asks the compiler to write what it knows, and returns the folder; call it before jax runs."""
    folder = Path(tempfile.mkdtemp(prefix='early-'))
    flags = f'--xla_dump_to={folder} --xla_dump_hlo_as_text'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags}'.strip()
    return folder


def compile_until_scheduled(
    lowered: Any, folder: Path, finish: Callable[[str, dict[str, int]], None]
) -> None:
    """Compiles a program until its text is there, and ends this process.

    Args:
      lowered: the program.
      folder: the folder of `ask_for_text`.
      finish: is called with the text and the sizes in bytes of the memory.

    Raises:
      Exception: as the compiler does, for example if the program needs too much memory.
    """

    failed = threading.Event()

    def watch() -> None:
        while not (found := sorted(folder.glob(_TEXT))) or not _is_complete(found[0]):
            if failed.wait(0.3):
                return
        status = 1
        try:
            report, buffers = (next(folder.glob(name)) for name in (_REPORT, _BUFFERS))
            finish(found[0].read_text(), _sizes(report.read_text(), buffers.read_text()))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)  # nothing can stop a compiler

    threading.Thread(target=watch, daemon=True).start()
    try:
        lowered.compile()
    except BaseException:
        failed.set()
        raise
    threading.Event().wait(60)  # the text is there by now


def _is_complete(path: Path) -> bool:
    """Whether a text has its end: that of the entry computation."""
    return path.read_text().rstrip().endswith('}')


def _sizes(report: str, buffers: str) -> dict[str, int]:
    """The sizes of the memory of a device, as in `MemoryUse`."""
    _, _, space = report.partition('Memory Space: default (color=0)')
    total = re.search(r'Total bytes: (\d+)', space)
    assert total is not None, report[:200]
    arguments = sum(map(int, _ARGUMENT.findall(buffers)))
    return {
        'peak': int(total[1]),
        'arguments': arguments,
        'temporaries': int(total[1]) - arguments,
    }
