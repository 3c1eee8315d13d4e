"""Texts of a dump, read from files that may be binary, empty or not readable."""

from __future__ import annotations

from pathlib import Path


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
      ValueError: if the file cannot be read, or is binary or empty.
    """
    try:
        held = file.read_bytes()
    except OSError as error:
        raise ValueError(f'{file} cannot be read: {error.strerror}') from error
    if not held.strip():
        raise ValueError(f'{file} is empty')
    if held.startswith(b'ML\xefR'):
        raise ValueError(f'{file} is MLIR bytecode: write the text, as str(lowered.compiler_ir())')
    try:
        text = held.decode()
    except UnicodeDecodeError:
        text = '\0'
    if '\0' in text:
        raise ValueError(
            f'{file} is binary: dump the text of a module, with --xla_dump_hlo_as_text or '
            'compiled.as_text()'
        )
    return text
