"""The errors of users' functions show the lines of users only, on the terminal."""

import subprocess
import sys
import traceback
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning import PjitPartitioner

pytestmark = pytest.mark.core
X = np.ones((8, 8), np.float32)
KEY, ZERO = jax.random.key(0), ZeroDivisionError
PARTITIONER = PjitPartitioner(layout='fsdp')


def init(key):
    return {'w': jnp.ones((8, 8))}


def divide(state, x):
    return state, 1 / 0


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x) @ jnp.ones((5, 5))


def bad_init(key):
    return Model().init(key, X)


def call_of(step):
    setup = PARTITIONER.setup(init, step, 0)
    return lambda: setup.step(setup.state, X)


@pytest.mark.parametrize(
    'call, kind, names',
    [
        (call_of(divide), ZERO, ['divide']),
        (lambda: PARTITIONER.partition(divide, None, None)({}, X), ZERO, ['divide']),
        (
            lambda: PARTITIONER.partition(divide, (None,), None)({}, x=X),
            ZERO,
            ['divide'],
        ),
        (
            lambda: PARTITIONER.partition(divide, None, None).lower({}, X),
            ZERO,
            ['divide'],
        ),
        (
            lambda: PARTITIONER.plan(bad_init, KEY),
            TypeError,
            ['bad_init', '__call__'],
        ),
        (
            lambda: PARTITIONER.init(bad_init, KEY),
            TypeError,
            ['bad_init', '__call__'],
        ),
        (
            lambda: PARTITIONER.setup(bad_init, divide, KEY),
            TypeError,
            ['bad_init', '__call__'],
        ),
        (call_of(lambda state, x: (state, x.sum('nothing'))), None, ['<lambda>']),
        (lambda: PARTITIONER.to_global({'x': X[:3]}), ValueError, []),
    ],
    ids=['setup', 'partition', 'keywords', 'lower', 'plan', 'init', 'state', 'jax', 'own'],
)
def test_only_lines_of_the_program(call, kind, names):
    with pytest.raises(kind or Exception) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [frame.name for frame in frames if Path(frame.filename) == Path(__file__)]
    others = [f.filename for f in frames if Path(f.filename) != Path(__file__)]
    assert not [name for name in others if 'pytest' not in name], others
    assert own[-len(names) :] == names or not names


def test_all_frames_on_request():
    code = (
        'import jax\nfrom partitioning import PjitPartitioner\n'
        "PjitPartitioner(layout='fsdp').partition(lambda x: 1 / 0, None, None)(1.0)\n"
    )
    shown = {}
    for mode in ('auto', 'off'):
        done = subprocess.run(
            [sys.executable, '-c', code],
            env={'JAX_TRACEBACK_FILTERING': mode, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': '.'},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        shown[mode] = [line for line in done.stderr.splitlines() if line.startswith('  File')]
    assert [line.split('"')[1] for line in shown['auto']] == ['<string>', '<string>']
    assert any('partitioned_function.py' in line for line in shown['off'])
