"""The README's Python blocks run, and every public name is documented somewhere."""

import functools
import importlib.util
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import partitioning
from partitioning import (
    PjitPartitioner,
    TrainState,
    create_mesh,
    with_logical_partitioning,
)
from partitioning.compat.pytorch import ShardingPlan
from partitioning.plan import building, impose_plan

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()
HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None


class Mlp(nn.Module):
    """The model of the README: fc1 [64, 256] and fc2 [256, 64], with biases."""

    calls = 0

    @nn.compact
    def __call__(self, x):
        type(self).calls += 1
        for name, size, names in (('fc1', 256, ('embed', 'mlp')), ('fc2', 64, ('mlp', 'embed'))):
            x = nn.Dense(
                size,
                kernel_init=with_logical_partitioning(nn.initializers.ones, names),
                bias_init=with_logical_partitioning(nn.initializers.zeros, names[1:]),
                name=name,
            )(x)
        return x


def python_blocks(title):
    """The Python blocks of the section with this title, in their order."""
    section = re.search(rf'^##+ {title}\n(.*?)(?=^##|\Z)', README, re.M | re.S)[1]
    return re.findall(r'^```python\n(.*?)^```$', section, re.M | re.S)


@functools.cache
def assumed():
    """What the README assumes: a model, an optimizer, data, and what was made of them."""
    model, tx = Mlp(), optax.adam(1e-3)
    x = jnp.ones((256, 64))
    key = jax.random.key(0)

    def init(key):
        return TrainState.create(model.init(key, x), tx)

    def train_step(state, batch):
        def objective(params):
            return (model.apply({'params': params}, batch) ** 2).mean()

        loss, grads = jax.value_and_grad(objective)(state.params)
        return state.apply_gradients(grads, tx), {'loss': loss}

    partitioner = PjitPartitioner(num_partitions=2)
    plan = partitioner.plan(init, key)
    state = plan.init(key)
    return {
        **{'model': model, 'tx': tx, 'x': x, 'key': key, 'batch': x, 'init': init},
        **{'train_step': train_step, 'partitioner': partitioner, 'plan': plan, 'state': state},
        **{'params': state.params, 'mesh': create_mesh((4, 2), ('data', 'model'))},
        **{'read': lambda rows: np.ones((len(rows), 64), np.float32)},
        **{'PjitPartitioner': PjitPartitioner, 't': jnp.ones((8, 4))},
    }


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The names of `assumed`, and a folder with a corpus and a plan as the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'corpus').mkdir()
    for name in range(40):
        (tmp_path / 'corpus' / f'{name}.txt').write_text(f'document {name}\n' * 400)
    assumed()['plan'].save('before.json')
    return dict(assumed())


def run(blocks, names):
    for source in blocks:
        exec(compile(source, 'README.md', 'exec'), names)
    return names


def test_data(names, capsys):
    made = run(python_blocks('Data'), names)
    assert {a.shape for a in made['batch'].values()} == {(256, 1024)}


def test_your_own_program_traces_the_model_once_and_walks_the_state_once(names, monkeypatch):
    walks = []

    def walk(*args):
        walks.append(args)
        return original(*args)

    original = building.walk
    monkeypatch.setattr(building, 'walk', walk)
    example, *others = python_blocks('Partition your own program')
    until_state, of_step = example.split('state = plan.init(key)')
    calls = Mlp.calls
    made = run([until_state + 'state = plan.init(key)'], names)
    assert (Mlp.calls - calls, len(walks)) == (1, 1)
    kernel = made['state'].params['fc1']['kernel']
    assert kernel.addressable_shards[0].data.shape == (64, 128)
    made = run([of_step, *others], names)
    assert made['batch'].shape == (256, 64)
    up, down = jnp.ones((64, 256)), jnp.ones((256, 64))
    laid_out = made['partitioner'].partition(made['mlp'], None, None)(made['x'], up, down)
    assert laid_out.shape == (256, 64)


@pytest.mark.skipif(not HAS_LIBTPU, reason='libtpu, which describes TPUs, is not installed')
def test_machines_that_are_not_here(names):
    made = run(python_blocks('Plan for any machine'), names)
    assert dict(made['plan'].mesh.shape) == {'data': 4, 'fsdp': 16, 'model': 8}
    assert made['audit'].bytes_per_device > 0


def test_plans(names, capsys):
    run(python_blocks('Plans are files'), names)
    assert 'the plans are the same' in capsys.readouterr().out


def test_the_difference_that_is_shown(names):
    [shown] = re.findall(r'^```\n(~ .*?)```$', README, re.M | re.S)
    params, mesh = names['params'], names['mesh']
    plans = []
    for fc1 in (P(None, 'model'), P('data', 'model')):
        plan = ShardingPlan({'fc1/kernel': fc1, 'fc2/kernel': P('model')}).resolve(params, mesh)
        plans.append(impose_plan(plan, {'params': params}, mesh))
    assert str(partitioning.diff(*plans)) == shown.strip()


def test_other_systems(names, capsys):
    made = run(python_blocks('Coming from another system'), names)
    assert made['plan'].rows


def test_every_public_name_is_documented():
    """It must appear in the README, the guides, the notebooks or the trainer."""
    files = [ROOT / 'README.md', *ROOT.glob('docs/**/*.md'), *ROOT.glob('configs/**/*.md')]
    files += [*ROOT.glob('notebooks/*.ipynb'), *ROOT.glob('train/**/*.py')]
    words = {word for file in files for word in re.findall(r'\w+', file.read_text())}
    assert not set(partitioning.__all__) - words
