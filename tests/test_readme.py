"""The README's Python blocks run in order in one namespace, and every public name is documented."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import partitioning
from partitioning.plan import building

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()
BLOCKS = re.findall(r'^```python\n(.*?)^```$', README, re.M | re.S)
HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None


class Ran(NamedTuple):
    """A Python block of the README after it ran, in the namespace of the blocks before it.

    Attributes:
      names: the namespace.
      printed: what the block printed.
      walks: the number of walks over a state.
      traces: how often the README's init function was traced.
    """

    names: dict[str, Any]
    printed: str
    walks: int
    traces: int


@pytest.fixture(scope='module')
def after(tmp_path_factory):
    """Returns a function (text) -> the Ran of the block that contains this text."""
    folder = tmp_path_factory.mktemp('readme')
    for document in ('README.md', 'CONTRIBUTING.md'):
        (folder / document).write_text((ROOT / document).read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ran = _run_blocks(patch)

    def find(text):
        [number] = [n for n, block in enumerate(BLOCKS) if text in block]
        return ran[number]

    return find


def _run_blocks(patch):
    namespace: dict[str, Any] = {'TRACES': []}
    walks: list[Any] = []
    original = building.walk
    patch.setattr(building, 'walk', lambda *a, **k: walks.append(a) or original(*a, **k))
    ran = []
    for block in BLOCKS:
        traced, walked, printed = len(namespace['TRACES']), len(walks), io.StringIO()
        counting = re.sub(r'(def init\(key\):\n)', r'\1    TRACES.append(key)\n', block)
        if HAS_LIBTPU or 'topology' not in block:
            with contextlib.redirect_stdout(printed):
                exec(compile(counting, 'README.md', 'exec'), namespace)
        counts = len(walks) - walked, len(namespace['TRACES']) - traced
        ran.append(Ran(dict(namespace), printed.getvalue(), *counts))
    return ran


def test_your_own_program_traces_the_model_once_and_walks_the_state_once(after):
    example = after('plan.init(key)  # each device')
    assert (example.traces, example.walks) == (1, 1)
    kernel = example.names['state'].params['fc1']['kernel']
    assert kernel.addressable_shards[0].data.shape == (64, 128)
    model, params = example.names['model'], example.names['plan'].init(jax.random.key(0)).params
    outputs = model.apply({'params': jax.tree.map(np.asarray, params)}, np.ones((256, 64)))
    expected = float(np.mean((np.asarray(outputs) - 1) ** 2))
    assert float(example.names['metrics']['loss']) == pytest.approx(expected, rel=1e-5)


def test_batches_and_activations(after):
    batch = after('get_data_layout(256)').names['batch']
    assert batch.shape == (256, 64)
    assert batch.sharding.spec == P('data')
    np.testing.assert_array_equal(batch, after('get_data_layout(256)').names['examples'][:256])
    tokens = after('Feed(batches, partitioner').names['tokens']
    assert {a.shape for a in tokens.values()} == {(16, 128)}
    names = after('def mlp(').names
    mlp = names['partitioner'].partition(names['mlp'], None, None)
    assert mlp(np.ones((256, 64)), np.ones((64, 256)), np.ones((256, 64))).shape == (256, 64)


@pytest.mark.skipif(not HAS_LIBTPU, reason='libtpu, which describes TPUs, is not installed')
def test_machines_that_are_not_here(after):
    names = after("topology='v5p:8x8x8'").names
    assert dict(names['plan'].mesh.shape) == {'data': 4, 'fsdp': 16, 'model': 8}
    assert names['audit'].bytes_per_device > 0


def test_the_difference_that_is_shown(after):
    [shown] = re.findall(r'^```\n\.\.\.\n(~ .*?)```$', README, re.M | re.S)
    assert set(shown.splitlines()) <= set(after('Plan.load(').printed.splitlines())


def test_other_systems(after):
    assert after('ShardingPlan(').names['params']['fc1']['kernel'].sharding.spec == P(None, 'model')
    np.testing.assert_array_equal(after('torch_xla.mark_sharding').names['t'], np.full((8, 4), 2))
    assert after('VariablePartitioner(mesh)').names['plan'].rows


def test_every_public_name_is_documented():
    """It must appear in the README, the guides, the notebooks or the trainer."""
    files = [ROOT / 'README.md', *ROOT.glob('docs/**/*.md'), *ROOT.glob('configs/**/*.md')]
    files += [*ROOT.glob('notebooks/*.ipynb'), *ROOT.glob('train/**/*.py')]
    words = {word for file in files for word in re.findall(r'\w+', file.read_text())}
    assert not set(partitioning.__all__) - words
