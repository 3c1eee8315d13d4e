"""The notebooks run, and print what they show."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / 'notebooks').glob('*.ipynb'))


@pytest.mark.core
@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(notebook):
    cells = [c for c in json.loads(notebook.read_text())['cells'] if c['cell_type'] == 'code']
    assert cells
    code = '\n'.join(''.join(cell['source']) for cell in cells)
    shown = ''.join(
        ''.join(output['text']).rstrip() + '\n' for cell in cells for output in cell['outputs']
    )
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    printed = [line.rstrip() for line in run.stdout.splitlines() if line.strip()]
    assert printed == [line.rstrip() for line in shown.splitlines() if line.strip()]
