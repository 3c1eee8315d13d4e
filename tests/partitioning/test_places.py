"""Whether a line is the program's or a library's depends on where the library is installed."""

import importlib.util
import sys

import flax
import jax
import pytest

from meshwright.user_lines import is_library, user_line
from partitioning import PjitPartitioner
from partitioning.library_files import is_library_file, is_standard_file

pytestmark = pytest.mark.core
STEP = "import jax\n\ndef step(s, b):\n    return jax.lax.axis_index('nowhere'), s\n"


def module_at(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STEP)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize('folder', ['flax', 'flax/examples', 'optax', 'jax', 'haiku', 'mine'])
def test_folders_may_have_any_name(tmp_path, folder):
    step = module_at(tmp_path / folder / 'prog.py', 'prog').step
    called = PjitPartitioner(layout='fsdp').partition(lambda s, b: step(s, b), None, None)
    with pytest.raises(ValueError, match=r'prog\.py:4\b'):
        called({}, 1.0)
    assert user_line([f'{tmp_path}/{folder}/prog.py:4', 'other.py:1']).endswith('prog.py:4')


def test_an_editable_install_is_a_library(tmp_path, monkeypatch):
    """Its files are where its module says, not in site-packages."""
    from partitioning import library_files

    folder = tmp_path / 'clone' / 'flax'
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location(
            'flax', folder / '__init__.py', submodule_search_locations=[str(folder)]
        )
    )
    library_files._roots.cache_clear()
    monkeypatch.setitem(sys.modules, 'flax', module)
    try:
        assert is_library_file(f'{folder}/linen/module.py')
        assert not is_library_file(f'{tmp_path}/clone/examples/flax/train.py')
    finally:
        library_files._roots.cache_clear()


def test_libraries_of_other_machines_and_generated_code():
    assert is_library('/opt/venv/lib/python3.12/site-packages/optax/_src/base.py:3')
    assert is_library(f'{flax.__file__}:1') and is_library(f'{jax.__file__}:1')
    assert not is_library('/opt/venv/lib/python3.12/site-packages/transformers/llama.py:3')
    assert not is_library('/project/flax/examples/train.py:3')
    assert is_standard_file(importlib.util.__file__) and is_standard_file('<frozen runpy>')
    assert not is_standard_file('<stdin>') and not is_standard_file('<ipython-input-3-abc>')
