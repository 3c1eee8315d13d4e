"""The behaviours of the five systems that Meshwright follows, by id, and which of them are tested.

A row (a behaviour) has a test if the name of a test in this folder contains its id (`test_B7_...`).
It is not applicable if `tests/not_applicable.md` has a line `- <id>: reason`. `outcomes_of` answers
a separate question: whether the tests passed in a run.
"""

import ast
import functools
import re
from collections.abc import Iterable
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
    if (system, row) != ('E', 4)  # This id was never assigned.
)
_ID = re.compile(r'(?<=_)[A-E]\d+(?=_|$)')
_LINE = re.compile(r'- ([A-E]\d+): (\S.*)')


@dataclass(frozen=True)
class Rows:
    """Which rows have tests, and which are not applicable, according to the files.

    Attributes:
      tests: the ids in the names of tests.
      not_applicable: for each id that cannot apply to JAX, the reason.
    """

    tests: frozenset[str]
    not_applicable: dict[str, str]

    @property
    def left(self) -> list[str]:
        """The rows that have neither a test nor a reason."""
        return [row for row in IDS if row not in self.tests and row not in self.not_applicable]


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of the rows in one run, each list in the order of the ids.

    Attributes:
      rows: the tests and reasons in the files.
      tested: the rows of which a test passed and no test failed.
      failed: the rows of which a test failed, or contradicted its xfail mark.
      skipped: the rows of which all tests were skipped.
    """

    rows: Rows
    tested: list[str]
    failed: list[str]
    skipped: list[str]

    @property
    def not_run(self) -> list[str]:
        """The rows that have tests of which none has run."""
        seen = {*self.tested, *self.failed, *self.skipped}
        return [row for row in IDS if row in self.rows.tests and row not in seen]

    def __str__(self) -> str:
        """One line with the numbers, and the ids of the rows that are left, failed or skipped."""
        left = self.rows.left
        parts = [
            f'{len(self.tested)} tested, {len(self.rows.not_applicable)} not applicable, '
            f'{len(left)} left{_listed(left)}'
        ]
        if self.failed:
            parts.append(f'{len(self.failed)} failed{_listed(self.failed)}')
        if self.skipped:
            parts.append(f'{len(self.skipped)} skipped{_listed(self.skipped)}')
        if self.not_run:
            parts.append(f'{len(self.not_run)} not in this run')
        return 'seed behaviours: ' + '; '.join(parts)


def ids_in_name(test: str) -> list[str]:
    """The ids in the name or node id of a test. Ids in the names of its parameters do not count."""
    return _ID.findall(test.partition('[')[0].rpartition('::')[2])


def ids_in_tests(source: str) -> set[str]:
    """The ids in the names of the tests of a file, except tests that are always skipped."""
    return {
        found
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')
        if not any(_never_runs(decorator) for decorator in node.decorator_list)
        for found in ids_in_name(node.name)
    }


def ids_with_reasons(text: str) -> dict[str, str]:
    """The ids and reasons in lines `- <id>: reason`."""
    return dict(match.groups() for line in text.splitlines() if (match := _LINE.fullmatch(line)))


@functools.cache
def seed_rows() -> Rows:
    """The tests and reasons in the files, found without running any test."""
    tests = {row for path in HERE.glob('test_*.py') for row in ids_in_tests(path.read_text())}
    return Rows(frozenset(tests), ids_with_reasons(NOT_APPLICABLE.read_text()))


def outcomes_of(reports: Iterable[tuple[str, str]], rows: Rows) -> Outcomes:
    """The outcomes of the rows in a run.

    Args:
      reports: the node id and outcome of each test, as pytest names it: 'passed', 'skipped', or
        another name, which counts as a failure. A test may have several outcomes.
      rows: the tests and reasons in the files.
    """
    seen: dict[str, set[str]] = {}
    for test, outcome in reports:
        for row in ids_in_name(test):
            seen.setdefault(row, set()).add(outcome)
    here = {row: seen[row] for row in IDS if row in seen}
    failed = [row for row, outcomes in here.items() if outcomes - {'passed', 'skipped'}]
    skipped = [row for row, outcomes in here.items() if outcomes == {'skipped'}]
    tested = [row for row in here if row not in {*failed, *skipped}]
    return Outcomes(rows, tested, failed, skipped)


def _never_runs(decorator: ast.expr) -> bool:
    return bool(re.search(r'\bmark\.(skip|xfail)\b', ast.unparse(decorator)))


def _listed(rows: list[str]) -> str:
    return ': ' + ', '.join(rows) if rows else ''
