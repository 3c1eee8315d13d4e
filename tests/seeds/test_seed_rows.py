"""Each behaviour of the five systems has a test with its id, or a reason why it cannot have one."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from seed_rows import (
    HERE,
    IDS,
    NOT_APPLICABLE,
    Rows,
    ids_in_name,
    ids_in_tests,
    ids_with_reasons,
    outcomes_of,
    seed_rows,
)

pytestmark = pytest.mark.core


def test_there_are_93_ids():
    assert len(IDS) == len(set(IDS)) == 93
    assert {'A18', 'B19', 'C1', 'D19', 'E19'} <= {*IDS} and 'E4' not in IDS


def test_every_row_has_a_test_or_a_reason():
    assert not seed_rows().left


def test_no_row_has_both_a_test_and_a_reason():
    rows = seed_rows()
    assert not rows.tests & rows.not_applicable.keys()


def test_every_id_is_known():
    rows = seed_rows()
    assert rows.tests | rows.not_applicable.keys() <= {*IDS}


def test_every_line_of_the_list_has_an_id_and_a_reason():
    text = NOT_APPLICABLE.read_text()
    assert len(re.findall(r'^\s*[-*] ', text, re.MULTILINE)) == len(ids_with_reasons(text))


def test_every_line_of_the_table_has_a_tested_row():
    """The table lists differences that are intended."""
    lines = re.findall(r'^\| ([A-E]\d+) \|(.*)\|$', NOT_APPLICABLE.read_text(), re.MULTILINE)
    ids = [row for row, _ in lines]
    assert len(ids) > 20 and {*ids} <= seed_rows().tests
    assert [IDS.index(row) for row in ids] == sorted(IDS.index(row) for row in ids)
    assert all(len(list(filter(str.strip, cells.split(' | ')))) == 3 for _, cells in lines)


TESTS = """
def test_B1_something(): ...
def test_D8_D12_both(): ...
def helper_B2_is_not_a_test(): ...
class TestMany:
    def test_of_E19(self): ...
    def test_C33x_and_AB4(self): ...
@pytest.mark.skip('never')
def test_B3_never(): ...
@pytest.mark.skipif(no_libtpu, reason='sometimes')
def test_B4_at_times(): ...
"""


def test_ids_are_found_in_names():
    assert ids_in_tests(TESTS) == {'B1', 'D8', 'D12', 'E19', 'B4'}
    assert ids_in_name('tests/a_B2_/test_x.py::TestA1_::test_D8_D12_both[x_A3_::_A4_]') == [
        *('D8', 'D12'),
    ]


def test_reasons_are_found_in_lines():
    lines = '# Title\n- A1: of TensorFlow\n- A2:\n- A3 no colon\n  - A4: nested\n| A5 | x | y |\n'
    assert ids_with_reasons(lines) == {'A1': 'of TensorFlow'}


# The outcomes of a run.

ALL = Rows(frozenset(IDS), {})


def line(reports, rows=ALL):
    return str(outcomes_of(reports, rows)).removeprefix('seed behaviours: ')


def test_a_run_of_every_test():
    reports = [(f'tests/seeds/test_x.py::test_{row}_it', 'passed') for row in IDS]
    assert line(reports) == '93 tested, 0 not applicable, 0 left'
    rows = Rows(frozenset(IDS) - {'A3', 'B1', 'D2'}, {'A3': 'of TensorFlow'})
    reports = [(test, outcome) for test, outcome in reports if {*ids_in_name(test)} <= rows.tests]
    assert line(reports, rows) == '90 tested, 1 not applicable, 2 left: B1, D2'


def test_a_run_of_one_test():
    assert line([('test_x.py::test_B1_a', 'passed')]) == (
        '1 tested, 0 not applicable, 0 left; 92 not in this run'
    )
    assert line([]) == '0 tested, 0 not applicable, 0 left; 93 not in this run'
    assert line([('test_x.py::test_of_nothing', 'passed'), ('test_x.py', 'error')]) == line([])


@pytest.mark.parametrize('outcome', ['failed', 'error', 'xfailed', 'xpassed'])
def test_a_row_fails_if_one_of_its_tests_fails(outcome):
    """The order does not matter: the teardown of a fixture may fail after its test has passed."""
    reports = [('test_x.py::test_D8_D2_a', 'passed'), ('test_x.py::test_D8_a', outcome)]
    for given in (reports, reports[::-1]):
        assert line(given) == '1 tested, 0 not applicable, 0 left; 1 failed: D8; 91 not in this run'


def test_a_row_is_skipped_if_all_its_tests_are_skipped():
    reports = [('test_x.py::test_D19_a', 'skipped'), ('test_x.py::test_D19_b[1]', 'skipped')]
    assert line(reports) == (
        '0 tested, 0 not applicable, 0 left; 1 skipped: D19; 92 not in this run'
    )
    assert line([*reports, ('test_x.py::test_D19_b[2]', 'passed')]).startswith('1 tested')


RUN = """
import pytest
@pytest.fixture
def broken():
    yield
    raise OSError
def test_A1_passes(): pass
@pytest.mark.parametrize('x', ['_A2_', '[_A3_'])
def test_B1_passes(x): pass
def test_B2_fails(): assert False
def test_B2_passes(): pass
def test_C1_is_skipped(): pytest.skip('for now')
def test_C2_is_known_to_fail(): pytest.xfail('a defect')
def test_C3_breaks_later(broken): pass
"""


@pytest.mark.parametrize(
    'selection, expected',
    [
        ((), '2 tested, 0 not applicable, 87 left: A2, .*E19; 3 failed: B2, C2, C3; 1 skipped: C1'),
        (('-k', 'B1'), '1 tested, 0 not applicable, 87 left: .*E19; 5 not in this run'),
        (('--collect-only',), '0 tested, 0 not applicable, 87 left: .*E19; 6 not in this run'),
    ],
)
def test_pytest_prints_the_summary(tmp_path, selection, expected):
    """pytest runs in a folder like this one; tests in other folders do not count."""
    for folder in ('seeds', 'others'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f'test_of_{folder}.py').write_text(
            RUN if folder == 'seeds' else 'def test_E19_of_another(): pass'
        )
    for name in ('conftest.py', 'seed_rows.py'):
        shutil.copy(HERE / name, tmp_path / 'seeds')
    (tmp_path / 'not_applicable.md').write_text('')
    (tmp_path / 'pytest.ini').write_text('[pytest]')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *selection],
        cwd=tmp_path,
        env=os.environ | {'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'},  # The plugins load slowly.
        capture_output=True,
        text=True,
    )
    [last] = [x for x in done.stdout.splitlines() if x.startswith('seed behaviours: ')]
    assert re.fullmatch(f'seed behaviours: {expected}', last), last
