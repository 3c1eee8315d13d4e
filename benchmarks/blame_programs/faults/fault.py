"""How a fault is written down: a change of rules, of layouts, or of the text of a program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    name: f'benchmarks/blame_programs/{name}.py'
    for name in (
        *('linen_trainer', 'plain_trainer'),
        *('vision_trainer', 'translation_trainer', 'experts_trainer'),
    )
}
# The files of our_transformer that faults change.
_OWN_FILES = (
    *(f'train/models/{name}.py' for name in ('attention', 'elementary', 'forward')),
    'train/running/steps.py',
)

Fault = dict[str, Any]


def rules_fault(program: str, kind: str, rules: Mapping[str, Any]) -> Fault:
    """Other mesh axes for logical axes."""
    place = ', '.join(f'{name} {axes}' for name, axes in rules.items())
    return {'program': program, 'kind': kind, 'place': place, 'rules': dict(rules)}


def layout_fault(
    kind: str, layout: Mapping[str, Sequence[Any]], program: str = 'plain_trainer'
) -> Fault:
    """Other PartitionSpecs for parameters, for their momentum or for the batch."""
    place = ', '.join(f'{name} {axes}' for name, axes in layout.items())
    found = {name: list(axes) for name, axes in layout.items()}
    return {'program': program, 'kind': kind, 'place': place, 'layout': found}


def edit(
    program: str, file: str, kind: str, place: str, old: str, new: str, *, suggested: bool = False
) -> Fault:
    """Another text for a part of a file, which the file has once.

    `suggested` says that only the author can write the line anew, who would write the old one.
    """
    fault = {'program': program, 'kind': kind, 'place': place, 'file': file}
    fault |= {'old': old, 'new': new}
    return fault | {'suggested': old} if suggested else fault


def find_line(program: str, text: str) -> tuple[str, str]:
    """Returns the file of a program that has a text, and the whole line if it is one."""
    for file in (FILES[program],) if program in FILES else _OWN_FILES:
        for line in (ROOT / file).read_text().splitlines(keepends=True):
            if text in line:
                return file, line if line.strip() == text else text
    raise ValueError(f'no line of {program} has {text!r}')


class Constraint(NamedTuple):
    """A constraint on the layout of an array, as a line of a program has it.

    Attributes:
      program: the program.
      line: the line.
      call: the function with its arguments.
      function: the name of the function.
      value: the array.
      names: the layout, such as `('batch', 'length')` or `P('data', None)`.
      entries: the entries of the layout.
    """

    program: str
    line: str
    call: str
    function: str
    value: str
    names: str
    entries: list[str]

    def write(self, entries: Sequence[str]) -> str:
        """The layout with other entries."""
        opening = self.names[: self.names.index('(') + 1]
        return f'{opening}{", ".join(entries)})'

    def relaid(self, kind: str, entries: Sequence[str]) -> Fault:
        """The fault that gives the line other entries."""
        return self.replaced(kind, self.names, self.write(entries))

    def replaced(self, kind: str, part: str, text: str, shown: int = 100) -> Fault:
        """The fault that replaces a part of the line; its place shows the end of the new text."""
        file, place = FILES[self.program], f'{self.line.strip()[:60]} -> {text[-shown:]}'
        new = self.line.replace(part, text)
        return edit(self.program, file, kind, place, f'{self.line}\n', f'{new}\n')


def constraints_of(program: str) -> Iterator[Constraint]:
    """Yields the constraints in the file of a program, in the order of their lines."""
    for line in (ROOT / FILES[program]).read_text().splitlines():
        found = re.search(r'\b(constrain|lay_out)\((.*), (\(.*?\)|P\(.*?\))\)', line)
        if found and 'import' not in line:
            entries = re.findall(r"'\w+'|None", found[3])
            yield Constraint(program, line, found[0], found[1], found[2], found[3], entries)
