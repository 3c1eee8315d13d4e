"""Executes notebooks in place, each in a fresh kernel on eight virtual CPU devices.

    python notebooks/execute.py            # all of this folder
    python notebooks/execute.py tour.ipynb  # of this folder, or a path to any other

What is written depends on nothing but the notebook: no times, no paths, no names of machines.
"""

import os
import sys
import tempfile
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  # the first import on a machine warns of its cost
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent
_METADATA = {
    'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'},
    'language_info': {'name': 'python'},
}
_CELL_SECONDS = 120


def executed(path: Path) -> NotebookNode:
    """A notebook with the outputs of running it now, in the folder where it lies.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raises.
      ValueError: a cell writes to stderr, where warnings are, with the paths of this machine.
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
            # Sockets that are files: no ports that others may listen on.
            config=Config(KernelManager={'transport': 'ipc', 'ip': f'{sockets}/kernel'}),
        ).execute(env={**os.environ, **environment})
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.get('name') == 'stderr':
                raise ValueError(f'{path.name}: a cell writes to stderr:\n{output.text}')
    notebook.metadata = nbformat.from_dict(_METADATA)  # the kernel adds its version
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == 'code']


def shown(cell: NotebookNode) -> tuple[list[str], int]:
    """What a cell shows: the lines of its text, and how many images."""
    images = [o for o in cell.outputs if 'image/png' in o.get('data', {})]
    texts = [
        o.text if o.output_type == 'stream' else o.data.get('text/plain', '')
        for o in cell.outputs
        if o not in images
    ]
    return [line.rstrip() for line in '\n'.join(texts).splitlines() if line.strip()], len(images)


def found(name: str) -> Path:
    """The notebook of a path, or of a name in this folder.

    Raises:
      SystemExit: there is none, in one line.
    """
    for path in (Path(name), FOLDER / name):
        if path.is_file():
            return path
    known = ', '.join(sorted(path.name for path in FOLDER.glob('*.ipynb')))
    raise SystemExit(f'there is no notebook {name!r}; in {FOLDER} there are {known}')


def main(names: list[str]) -> None:
    """Executes notebooks, by default all of this folder, and writes them where they are."""
    paths = [found(name) for name in names] or sorted(FOLDER.glob('*.ipynb'))
    for path in paths:
        print(f'executing {path.name}', flush=True)
        nbformat.write(executed(path), path)


if __name__ == '__main__':
    main(sys.argv[1:])
