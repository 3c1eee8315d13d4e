"""The names that gin files may use, which names.ini lists as text."""

from __future__ import annotations

import configparser
from pathlib import Path


def _read(section: str) -> dict[str, list[str]]:
    parser = configparser.ConfigParser(delimiters=('=',))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keeps upper case
    parser.read_string(Path(__file__).with_name('names.ini').read_text())
    return {module: names.split() for module, names in parser[section].items()}


REGISTERED = _read('registered')
BY_MODULE = REGISTERED | _read('by module')
