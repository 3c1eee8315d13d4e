"""Fixtures for tests of gin files, which conftest.py makes available to every test."""

import sys
import textwrap

import gin
import pytest
from small_t5x import T5X_MODEL, T5X_SMALL, T5X_TASK

from train.errors import ConfigError
from train.gin.checks import check_listed
from train.gin.load import find_entry, load_config as load_with_aliases
from train.gin.parsing import read_statements
from train.t5x.modules import ALIASES


def load_config(files, bindings=(), search_paths=(), allow=()):
    """Loads gin files as every command does, with T5X's names.

    What is loaded must also pass the check that commands make before they import jax.
    """
    load_with_aliases(files, bindings, search_paths, allow, ALIASES)
    if not allow:
        check_listed(read_statements(files, bindings, search_paths), ALIASES)


@pytest.fixture
def load(tmp_path):
    """Writes a gin file, `run.gin`, and loads it with bindings."""

    def load(text, *bindings, **options):
        path = tmp_path / 'run.gin'
        path.write_text(textwrap.dedent(text))
        load_config([str(path)], bindings, **options)

    return load


@pytest.fixture
def refusal(load):
    """Loads an invalid gin file, and returns the message of the error."""

    def refusal(text, *bindings, **options):
        with pytest.raises(ConfigError) as error:
            load(text, *bindings, **options)
        return str(error.value)

    return refusal


@pytest.fixture
def intruder(tmp_path, monkeypatch):
    """Modules outside the allowed packages. Importing one writes its name to the returned file."""
    folder, trace = tmp_path / 'modules', tmp_path / 'trace'
    folder.mkdir()
    names = ('intruder', 'train_intruder', 'intruder2')
    for name in names:
        (folder / f'{name}.py').write_text(
            textwrap.dedent(f"""
                import os
                open({str(trace)!r}, 'a').write({name!r})
                def make(size=1):
                    return size
                class Sized:
                    pass
                class Odd:
                    def __getattr__(self, name):
                        return self
                    def __call__(self):
                        return self
                odd = Odd()
            """)
        )
    monkeypatch.syspath_prepend(str(folder))
    yield trace
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def t5x_files(texts, tmp_path):
    """The gin files of T5X for a kind of run on a small task."""
    task = tmp_path / 'task.gin'
    task.write_text(T5X_TASK.format(root=texts))
    return lambda kind: [T5X_MODEL, f'configs/t5x/{kind}.gin', str(task)]


@pytest.fixture
def load_t5x(t5x_files):
    """Loads the gin files of T5X for a kind of run, and returns its entry point."""

    def load(kind, *bindings):
        gin.clear_config()
        # T5X's evaluations have no learning rate and no seed.
        small = T5X_SMALL if kind != 'eval' else T5X_SMALL[:-2]
        load_config(t5x_files(kind), [*small, *bindings])
        return find_entry()

    return load
