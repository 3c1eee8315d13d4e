"""The faults of `benchmarks/blame.py` are edits of one place each, and seeds share none of them."""

import pytest

from benchmarks.blame_programs.faults.drawing import draw_faults, fault_set
from benchmarks.blame_programs.faults.fault import ROOT


@pytest.mark.parametrize('number', range(1, 6))
def test_each_fault_changes_one_place_and_keeps_the_numbers_of_lines(number):
    faults = list(fault_set(number))
    assert len({fault['key'] for fault in faults}) == len(faults) > 50
    for fault in faults:
        if 'file' in fault:
            assert (ROOT / fault['file']).read_text().count(fault['old']) == 1, fault['place']
            assert fault['old'].count('\n') == fault['new'].count('\n'), fault['place']


def test_seeds_with_figures_share_no_fault_with_the_seed_that_the_code_was_written_with():
    keys = [{fault['key'] for fault in draw_faults(seed)} for seed in (0, 1)]
    assert not keys[0] & keys[1]
    assert keys[0] | keys[1] == {fault['key'] for fault in fault_set(1)}
