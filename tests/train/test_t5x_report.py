"""The report of what T5X's settings become."""

import re

import pytest

from train.t5x.__main__ import main
from train.t5x.report import find_description

pytestmark = pytest.mark.core

FILE = """
from __gin__ import dynamic_registration
import t5.data.mixtures
import __main__ as train_script
from t5x import utils
from t5x import unheard_of

STEPS = 7
train_script.train.total_steps = 3
train_script.train:
  total_steps = %STEPS  # this one counts
  train_dataset_cfg = @train/utils.DatasetConfig()
train/utils.DatasetConfig:
  batch_size = 8
utils.RestoreCheckpointConfig.use_gda = False
unheard_of.Thing.size = 1
"""


@pytest.fixture
def report(tmp_path, capsys):
    """Prints the report of a file, and returns its lines."""

    def report(text, *arguments):
        (tmp_path / 'run.gin').write_text(text)
        assert main(['report', str(tmp_path / 'run.gin'), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return report


def test_the_report_lists_every_setting(report):
    lines = report(FILE)
    text = '\n'.join(lines)
    for expected in (
        r'train_script\.train +train\.t5x\.train_script\.train',
        r'  total_steps +7 +the step at which the run ends',
        r'  batch_size +8 +the number of rows in a batch',
        r'train/utils\.DatasetConfig +train\.t5x\.datasets\.DatasetConfig',
        r'  use_gda +False +no effect: T5X no longer has it',
        r"unheard_of\.Thing +no equivalent: 'unheard_of\.Thing' is t5x\.unheard_of\.Thing",
        r'5 settings: 3 have an equivalent, 1 have no effect, 1 have no equivalent',
        r't5\.data\.mixtures: not imported',
        r"error: .*run\.gin:16: 'unheard_of\.Thing' is t5x\.unheard_of\.Thing",
    ):
        assert re.search(expected, text), (expected, text)
    table = lines[: next(i for i, line in enumerate(lines) if 'settings:' in line)]
    assert all(len(line) <= 100 and line == line.rstrip() for line in table)
    assert '\x1b' not in text


def test_the_report_says_what_the_files_start(report):
    lines = report(FILE.replace('unheard_of.Thing.size = 1', ''), '--gin.STEPS=9')
    assert lines[-1] == 'The files start train.t5x.train_script.train'
    assert any(re.match(r'  total_steps +9 ', line) for line in lines)


def test_the_report_needs_a_file(capsys):
    assert main(['report']) == 2
    assert main(['explain', 'run.gin']) == 2
    assert capsys.readouterr().err.count('error: ') == 2


def test_descriptions_are_those_of_the_documentation():
    def function(size, first, second, *names):
        """Makes something.

        Args:
          size: the size,
            in bytes.
          first, second: both ends.
          *names: the names.

        Returns:
          size: nothing.
        """

    assert find_description(function, 'size') == 'the size, in bytes.'
    assert find_description(function, 'second') == 'both ends.'
    assert find_description(function, 'names') == 'the names.'
    assert find_description(function, 'third') is None
