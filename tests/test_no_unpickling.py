"""Nothing that the packages read is a pickle: `conftest.py` blocks them in every test."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest

import train

_READER = Path(train.__file__).parent / 'reader.py'


def _read_there(source, **names):
    """Runs lines as if they stood in a module of the trainer."""
    exec(compile(source, str(_READER), 'exec'), names)


def test_a_pickle_that_a_reader_opens_is_blocked():
    held = io.BytesIO()
    np.save(held, np.array([{}], object), allow_pickle=True)
    held.seek(0)
    with pytest.raises(PermissionError, match=r'reader\.py:1 unpickles numpy'):
        _read_there('np.load(held, allow_pickle=True)', np=np, held=held)


def test_a_pickle_of_a_test_is_not_blocked():
    assert pickle.loads(pickle.dumps(Path('a'))) == Path('a')
