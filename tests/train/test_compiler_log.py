"""The compiler has no objections to the models and layouts that come with the project."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_shipped_configs import MODELS, PRESETS

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]


def test_no_shipped_config_and_preset_makes_the_compiler_warn():
    ran = subprocess.run(
        [sys.executable, ROOT / 'tests/train/compile_shipped.py'],
        env=os.environ
        | {'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '8', 'TF_CPP_MIN_LOG_LEVEL': '0'},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    _, *sections = re.split(r'^# ', ran.stderr, flags=re.MULTILINE)
    logs = dict(section.split('\n', 1) for section in sections)
    assert len(logs) == len(MODELS) * len(PRESETS) + 3
    gathered = logs.pop('gathered')
    # The compiler also reports that it is slow, on a busy machine.
    warning = re.compile('^[WE][0-9]{4} (?!.*slow_operation_alarm)', re.MULTILINE)
    assert not {name: log for name, log in logs.items() if warning.search(log)}
    if jax.__version_info__ >= (0, 12):
        assert 'Involuntary full rematerialization' in gathered, 'the log is not captured'
