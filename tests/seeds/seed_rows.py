"""The behaviours of the five systems that Meshwright follows, by id, and which of them are tested.

A row is tested where the name of a test in this folder has its id (`test_B7_...`), and not
applicable where `tests/not_applicable.md` has a line `- <id>: reason`.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NOT_APPLICABLE = HERE.parent / 'not_applicable.md'
SYSTEMS = {'A': 'AutoDist', 'B': 'Flax', 'C': 'PyTorch', 'D': 'torch_xla', 'E': 'T5X'}
LAST = {'A': 18, 'B': 19, 'C': 19, 'D': 19, 'E': 19}
IDS = tuple(
    f'{system}{row}'
    for system, last in LAST.items()
    for row in range(1, last + 1)
    if (system, row) != ('E', 4)  # there is none
)
_ID = re.compile(r'(?<=_)[A-E]\d+(?=_|$)')
_LINE = re.compile(r'- ([A-E]\d+): (\S.*)')


@dataclass(frozen=True)
class Rows:
    """What has become of the rows.

    Attributes:
      tested: ids in the names of tests.
      not_applicable: the reason of each that cannot apply to JAX.
    """

    tested: frozenset[str]
    not_applicable: dict[str, str]

    @property
    def left(self) -> list[str]:
        """Rows that are neither."""
        return [row for row in IDS if row not in self.tested and row not in self.not_applicable]

    def __str__(self) -> str:
        here = [row for row in IDS if row in self.tested]
        return (
            f'seed behaviours: {len(here)} tested, {len(self.not_applicable)} not applicable, '
            f'{len(self.left)} left{": " if self.left else ""}{", ".join(self.left)}'
        )


def ids_in_tests(source: str) -> set[str]:
    """The ids in the names of the tests of a file, those that are always skipped left out."""
    return {
        found
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')
        if not any(_never_runs(decorator) for decorator in node.decorator_list)
        for found in _ID.findall(node.name)
    }


def ids_with_reasons(text: str) -> dict[str, str]:
    """The ids of a list of lines `- <id>: reason`."""
    return dict(match.groups() for line in text.splitlines() if (match := _LINE.fullmatch(line)))


def seed_rows() -> Rows:
    """What has become of the rows, as the files of this folder say; nothing is run."""
    tested = {row for path in HERE.glob('test_*.py') for row in ids_in_tests(path.read_text())}
    return Rows(frozenset(tested), ids_with_reasons(NOT_APPLICABLE.read_text()))


def _never_runs(decorator: ast.expr) -> bool:
    return bool(re.search(r'\bmark\.(skip|xfail)\b', ast.unparse(decorator)))
