"""What release notes say about a change: a table of facts, and the notes that a user names."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.checking.radar.releases import version_key
from meshwright.checking.radar.steps import Change, ProgramStep, Step

_HEADING = re.compile(r'^#+\s+(?:(?P<package>[A-Za-z][\w.-]*)\s+)?v?(?P<version>\d+\.\d[\w.]*)')
_ITEM = re.compile(r'^\s*[*-]\s+(?P<text>.+)')
_NAME = re.compile(r'[A-Za-z_][\w.]*')
_CODE = re.compile(r'`~?([^`]+)`')
_SHORT = 4  # names of fewer characters are in too many lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence about a release.

    Attributes:
      package, release: the package and its version.
      names: the names that a line or an error must have, one of them.
      kinds: the kinds of differences that it is about, and 'error'; all if empty.
      text: the sentence.
      link: where it is from, or ''.
    """

    package: str
    release: str
    names: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    text: str
    link: str = ''


@functools.cache
def known_notes() -> tuple[Note, ...]:
    """The facts that come with this package."""
    held = json.loads(Path(__file__).with_name('release_notes.json').read_text(encoding='utf-8'))
    return tuple(
        Note(**{**one, 'names': tuple(one['names']), 'kinds': tuple(one.get('kinds', ()))})
        for one in held
    )


def read_notes(file: Path) -> tuple[Note, ...]:
    """Reads the items of a change log, below headings such as '## JAX 0.11.0'.

    An item is about the names that it writes as code.

    Args:
      file: a file of Markdown.

    Raises:
      ValueError: if it cannot be read, or has no heading with a version.
    """
    try:
        lines = file.read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'--notes={file}: {getattr(error, "strerror", None) or error}') from error
    found = tuple(_notes(lines))
    if not any(_HEADING.match(line) for line in lines):
        raise ValueError(f'--notes={file} has no heading with a version, such as "## jax 0.11.0"')
    return found


def _notes(lines: Sequence[str]) -> Iterator[Note]:
    package = release = ''
    item: list[str] = []
    for line in [*lines, '# end']:
        heading, start = _HEADING.match(line), _ITEM.match(line)
        if line.startswith('#') or start:
            if item and release:
                text = ' '.join(' '.join(item).split())
                names = tuple(dict.fromkeys(_names_in(text)))
                if names:
                    yield Note(package=package, release=release, names=names, text=text)
            item = [start['text']] if start else []
        elif item:
            item.append(line)
        if heading:
            package, release = (heading['package'] or 'jax').lower(), heading['version']
        elif line.startswith('# ') or (line.startswith('## ') and not heading):
            release = ''


def _names_in(text: str) -> Iterator[str]:
    for code in _CODE.findall(text):
        for name in _NAME.findall(code):
            last = name.rpartition('.')[2]
            if len(last) >= _SHORT and last not in ('func', 'class', 'True', 'False', 'None'):
                yield last


def notes_of_change(step: Step, change: Change, notes: Sequence[Note]) -> list[Note]:
    """The notes of the releases of a step that explain a change."""
    one = change.difference
    text = ' '.join((one.line, one.at.text, one.at.why))
    names = set(map(str.strip, change.cause.split(',')))
    return [n for n in _of_step(step, notes) if n.package in names and _explains(n, one.kind, text)]


def notes_of_error(step: Step, program: ProgramStep, notes: Sequence[Note]) -> list[Note]:
    """The notes of the releases of a step that explain why a program does not work."""
    return [n for n in _of_step(step, notes) if _explains(n, 'error', program.error)]


def _of_step(step: Step, notes: Sequence[Note]) -> Iterator[Note]:
    for note in notes:
        if note.package in step.moved:
            old, new = (version_key(v) for v in step.moved[note.package])
            if old < version_key(note.release) <= new:
                yield note


def _explains(note: Note, kind: str, text: str) -> bool:
    words: set[str] = set(re.findall(r'\w+', text))
    return (not note.kinds or kind in note.kinds) and any(
        word in words or ('.' in word and word in text) for word in note.names
    )


def plain_note(note: Note) -> dict[str, Any]:
    """A note as values that JSON can hold."""
    held = dataclasses.asdict(note)
    return {key: held[key] for key in ('package', 'release', 'text', 'link')}
