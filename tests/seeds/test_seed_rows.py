"""Each behaviour of the five systems is tested by its id, or has a reason why it cannot be."""

import re

import pytest
from seed_rows import IDS, NOT_APPLICABLE, ids_in_tests, ids_with_reasons, seed_rows

pytestmark = pytest.mark.core


def test_the_list():
    assert len(IDS) == len(set(IDS)) == 93
    assert {'A18', 'B19', 'C1', 'D19', 'E19'} <= {*IDS} and 'E4' not in IDS


def test_none_is_left():
    assert not seed_rows().left, str(seed_rows())


def test_none_is_both():
    rows = seed_rows()
    assert not rows.tested & rows.not_applicable.keys()


def test_none_is_unknown():
    rows = seed_rows()
    assert rows.tested | rows.not_applicable.keys() <= {*IDS}


def test_every_line_of_the_list_has_an_id_and_a_reason():
    text = NOT_APPLICABLE.read_text()
    assert len(re.findall(r'^\s*[-*]', text, re.MULTILINE)) == len(ids_with_reasons(text))


TESTS = """
def test_B1_something(): ...
def test_D8_D12_both(): ...
def helper_B2_is_no_test(): ...
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


def test_reasons_are_found_in_lines():
    lines = '# Title\n- A1: of TensorFlow\n- A2:\n- A3 no colon\n  - A4: nested\n'
    assert ids_with_reasons(lines) == {'A1': 'of TensorFlow'}
