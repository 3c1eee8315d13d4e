"""The notebooks run, and show what is written in them."""

import tempfile

import nbformat
import pytest

from notebooks.execute import FOLDER, code_cells, executed, found, shown

NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))
pytestmark = pytest.mark.core


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    """Texts are compared, of images only that they are there: their bytes are matplotlib's."""
    written = code_cells(nbformat.read(path, as_version=4))
    assert written
    for cell, now in zip(written, code_cells(executed(path)), strict=True):
        assert shown(cell) == shown(now), cell.source


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_the_machine_is_written(path):
    text = path.read_text()
    for private in (str(FOLDER.parent), tempfile.gettempdir(), 'site-packages', '.iopub.'):
        assert private not in text


@pytest.mark.parametrize(
    'source, message', [('import sys\nprint(1, file=sys.stderr)', 'stderr'), ('1 / 0', 'division')]
)
def test_what_goes_wrong_in_a_cell_is_an_error(source, message, tmp_path):
    cells = [nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / 'wrong.ipynb')
    with pytest.raises(Exception, match=message):
        executed(tmp_path / 'wrong.ipynb')


def test_notebooks_are_found_by_path_or_name(tmp_path):
    (tmp_path / 'own.ipynb').write_text('{}')
    assert found(str(tmp_path / 'own.ipynb')) == tmp_path / 'own.ipynb'
    assert found('tour.ipynb').resolve() == FOLDER / 'tour.ipynb'
    with pytest.raises(SystemExit, match=r"no notebook 'nope.ipynb'"):
        found('nope.ipynb')
