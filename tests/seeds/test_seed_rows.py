"""Each behaviour of the five systems has a test with its id in its name, or a reason without one.

A1 to A18 are behaviours of AutoDist, B1 to B19 of Flax, C1 to C19 of PyTorch, D1 to D19 of
torch_xla, and E1 to E19 of T5X, without E4, which was never assigned.
"""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

HERE = Path(__file__).parent
NOTES = (HERE.parent / 'not_applicable.md').read_text()
LAST = {'A': 18, 'B': 19, 'C': 19, 'D': 19, 'E': 19}
IDS = [f'{s}{n}' for s, last in LAST.items() for n in range(1, last + 1) if (s, n) != ('E', 4)]


def ids_in_tests(source):
    """The ids in the names of tests, except tests that are always skipped or expected to fail."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    names = [
        node.name
        for node in functions
        if node.name.startswith('test_')
        and not any(re.search(r'mark\.(skip|xfail)\b', ast.unparse(d)) for d in node.decorator_list)
    ]
    return {found for name in names for found in re.findall(r'(?<=_)[A-E]\d+(?=_|$)', name)}


TESTED = {found for path in HERE.glob('test_*.py') for found in ids_in_tests(path.read_text())}


def test_every_behaviour_has_a_test_or_a_reason():
    reasons = dict(re.findall(r'^- ([A-E]\d+): (\S.*)$', NOTES, re.MULTILINE))
    assert not TESTED & reasons.keys()
    assert TESTED | reasons.keys() == {*IDS}
    assert len(re.findall(r'^\s*[-*] ', NOTES, re.MULTILINE)) == len(reasons)


def test_every_intended_difference_is_of_a_tested_behaviour():
    ids = re.findall(r'^\| ([A-E]\d+) \|', NOTES, re.MULTILINE)
    assert {*ids} <= TESTED
    assert len(ids) > 20 and ids == sorted(ids, key=IDS.index)
