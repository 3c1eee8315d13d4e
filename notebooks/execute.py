"""Executes notebooks in place, each in a fresh kernel on eight virtual CPU devices.

Usage:
  python notebooks/execute.py             # all notebooks in this folder
  python notebooks/execute.py tour.ipynb  # one of them, or the path of any other

The stored outputs depend only on the notebook: they have no times, paths or names of machines.
"""

import os
import sys
import tempfile
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  # Its first import on a machine prints a warning.
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent
_METADATA = {
    'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'},
    'language_info': {'name': 'python'},
}
_CELL_SECONDS = 600  # Far longer than any cell takes; it only ends cells that hang.


def execute(path: Path) -> NotebookNode:
    """Runs a notebook in the folder that contains it, and returns it with the new outputs.

    The file does not change.

    Raises:
      nbclient.exceptions.CellExecutionError: if a cell raises.
      ValueError: if a cell writes to stderr. Warnings do, and they contain paths of this machine.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(_METADATA)
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as sockets:
        NotebookClient(
            notebook,
            timeout=_CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={'metadata': {'path': str(path.resolve().parent)}},
            # The sockets are files, because other programs could use or listen on a port.
            config=Config(KernelManager={'transport': 'ipc', 'ip': f'{sockets}/kernel'}),
        ).execute(env={**os.environ, **environment})
    check_no_warnings(path.name, notebook)
    notebook.metadata = nbformat.from_dict(_METADATA)  # The kernel has added its version.
    return notebook


def check_no_warnings(name: str, notebook: NotebookNode) -> None:
    """Raises ValueError if a cell has written to stderr."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.get('name') == 'stderr':
                raise ValueError(f'{name}: a cell writes to stderr:\n{output.text}')


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == 'code']


def summarize_outputs(cell: NotebookNode) -> tuple[list[str], int]:
    """The lines of text that a cell prints, and the number of images that it shows."""
    images = [o for o in cell.outputs if 'image/png' in o.get('data', {})]
    texts = [
        o.text if o.output_type == 'stream' else o.data.get('text/plain', '')
        for o in cell.outputs
        if o not in images
    ]
    return [line.rstrip() for line in '\n'.join(texts).splitlines() if line.strip()], len(images)


def find(name: str) -> Path:
    """The notebook with this path, or with this name in this folder.

    Raises:
      SystemExit: if there is none; the message lists the notebooks of this folder.
    """
    for path in (Path(name), FOLDER / name):
        if path.is_file():
            return path
    known = ', '.join(sorted(path.name for path in FOLDER.glob('*.ipynb')))
    raise SystemExit(f'error: there is no notebook {name!r}; {FOLDER} has {known}')


def main(names: list[str]) -> None:
    """Executes notebooks, by default all of this folder, and stores their outputs in them."""
    paths = [find(name) for name in names] or sorted(FOLDER.glob('*.ipynb'))
    for path in paths:
        print(f'executing {path.name}', flush=True)
        nbformat.write(execute(path), path)


if __name__ == '__main__':
    main(sys.argv[1:])
