"""Which files belong to libraries and which to the program, by where the libraries are installed.

The names of folders say nothing: a program may lie in a folder called flax, as in a clone of
google/flax, and an editable install of flax lies outside of site-packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

# Packages whose lines say nothing about the program that calls them, with the distribution that
# installs each of them.
LIBRARIES = {
    'jax': 'jax',
    'jaxlib': 'jaxlib',
    'flax': 'flax',
    'optax': 'optax',
    'chex': 'chex',
    'numpy': 'numpy',
    'einops': 'einops',
    'equinox': 'equinox',
    'haiku': 'dm-haiku',
    'keras': 'keras',
    'jaxtyping': 'jaxtyping',
    'absl': 'absl-py',
}
_INSTALLED = re.compile(r'/(?:site|dist)-packages/([^/:]+)')
_OWN = tuple(
    f'{Path(__file__).parents[1] / name}{os.sep}' for name in ('partitioning', 'meshwright')
)
_TRAINER = f'{Path(__file__).parents[1] / "train"}{os.sep}'
_STANDARD = tuple({f'{sysconfig.get_path(name)}{os.sep}' for name in ('stdlib', 'platstdlib')})
# Code without a file that a person has typed; all other code without a file is generated.
_TYPED = ('<string>', '<stdin>', '<console>', '<ipython-input', '<doctest')


def is_library_file(path: str, packages: tuple[str, ...] = tuple(LIBRARIES)) -> bool:
    """Whether a file belongs to one of these packages, as it is installed here or elsewhere.

    Paths of other machines, as in a dump, are recognized by site-packages.
    """
    found = _INSTALLED.search(path.replace(os.sep, '/'))
    if found is not None:
        return found[1] in packages
    return path.startswith(_roots(packages))


@functools.cache
def _roots(packages: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of these packages that are not in site-packages, such as editable installs."""
    found = []
    for name in packages:
        module = sys.modules.get(name)
        try:
            spec = importlib.util.find_spec(name) if module is None else module.__spec__
            importlib.metadata.distribution(LIBRARIES[name])
        except (ImportError, ValueError, AttributeError):
            continue  # without a distribution, a module of this name is the program's own
        if spec is not None and spec.origin is not None:
            found += [f'{Path(folder)}{os.sep}' for folder in spec.submodule_search_locations or ()]
    return tuple(found)


def is_standard_file(path: str) -> bool:
    """Whether a file belongs to Python's standard library, or is code that a library generated."""
    if path.startswith('<'):
        return not path.startswith(_TYPED)
    return path.startswith(_STANDARD) and _INSTALLED.search(path) is None


def is_program_frame(frame: FrameType) -> bool:
    """Whether a frame runs code of the program or of a model, and not of a library or of ours."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path == '<string>':  # the code of `python -c`, or a method that dataclasses generated
        return not name.startswith('__')
    return not (path.startswith(_OWN) or is_standard_file(path) or is_library_file(path))


def is_installed_file(path: str) -> bool:
    """Whether a file is not the user's to edit: it is in site-packages, or of the trainer."""
    return _INSTALLED.search(path.replace(os.sep, '/')) is not None or path.startswith(_TRAINER)


def is_own_error(error: BaseException) -> bool:
    """Whether `partitioning` or `meshwright` has raised an error, which then explains itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(_OWN)
