"""The notebooks run, and running them gives their stored outputs."""

import tempfile

import pytest

nbformat = pytest.importorskip('nbformat', reason='the notebooks need the extra [notebooks]')
from notebooks.execute import (  # noqa: E402  # It imports nbformat too.
    FOLDER,
    check_no_warnings,
    code_cells,
    execute,
    find,
    summarize_outputs,
)

NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))
pytestmark = pytest.mark.core


@pytest.mark.long
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    """Texts must be equal. Images are only counted, because matplotlib decides their bytes."""
    stored = code_cells(nbformat.read(path, as_version=4))
    assert stored
    for cell, now in zip(stored, code_cells(execute(path)), strict=True):
        assert summarize_outputs(cell) == summarize_outputs(now), cell.source


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_do_not_depend_on_the_machine(path):
    text = path.read_text()
    for private in (str(FOLDER.parent), tempfile.gettempdir(), 'site-packages', '.iopub.'):
        assert private not in text


def test_a_cell_that_raises_is_an_error(tmp_path):
    cells = [nbformat.v4.new_code_cell('1 / 0')]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / 'wrong.ipynb')
    with pytest.raises(Exception, match='division'):
        execute(tmp_path / 'wrong.ipynb')


def test_a_cell_that_writes_to_stderr_is_an_error():
    def written_to(name):
        output = nbformat.v4.new_output('stream', name=name, text='a warning')
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])])

    check_no_warnings('right', written_to('stdout'))
    with pytest.raises(ValueError, match=r'wrong: .* stderr:\na warning'):
        check_no_warnings('wrong', written_to('stderr'))


def test_find_takes_a_path_or_a_name(tmp_path):
    (tmp_path / 'own.ipynb').write_text('{}')
    assert find(str(tmp_path / 'own.ipynb')) == tmp_path / 'own.ipynb'
    assert find('tour.ipynb').resolve() == FOLDER / 'tour.ipynb'
    with pytest.raises(SystemExit, match=r"no notebook 'nope.ipynb'"):
        find('nope.ipynb')
