"""Forecasts of models of other libraries, whose operations are on lines of those libraries."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from meshwright import forecast, forecast_table
from meshwright.user_lines import shorten_sources
from partitioning import AxisRules, PjitPartitioner

pytestmark = pytest.mark.core

ROWS, WIDTH, HIDDEN, LAYERS = 512, 256, 2048, 3
HERE = f'{Path(__file__).name}:'


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name='down')(jnp.sin(nn.Dense(HIDDEN, name='up')(x)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = x + Mlp(name=f'layer_{i}')(x)
        return x


def train_step(params, x):
    gradients = jax.grad(lambda p: (Network().apply(p, x) ** 2).sum())(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients)


@pytest.fixture(scope='module')
def made():
    names = [('.*/up/kernel', (None, 'mlp')), ('.*/down/kernel', ('mlp', None)), ('.*', (None,))]
    partitioner = PjitPartitioner(
        {'data': 2, 'model': 4}, AxisRules([('batch', 'data'), ('mlp', 'model')], names=names)
    )
    plan = partitioner.plan(
        lambda key: Network().init(key, jnp.ones((1, WIDTH))), jax.random.key(0)
    )
    specs = (plan.specs, partitioner.data_partition_spec)
    step = partitioner.partition(train_step, specs, plan.specs)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return forecast(step, plan.abstract_state, x, topology='v5e:2x4', compile=False)


def test_exchanges_and_buffers_are_on_lines_of_the_model(made):
    """The products are on lines of flax. Gradients are summed where the step returns them."""
    exchanges = {collective.source.rpartition('/')[2] for collective, _ in made.collectives}
    assert exchanges > {''} and all(line.startswith(HERE) for line in exchanges - {''})
    text = forecast_table([made], width=160)
    lines = [line for line in text.splitlines() if 'dot_general' in line]
    assert lines and all(HERE in line for line in lines)


def test_equal_buffers_of_the_layers_are_one(made):
    """The backward pass needs the sines of the hidden layers, and their cosines."""
    hidden = f'f32[{ROWS // 2},{HIDDEN // 4}]'
    found = [array for array, _ in made.memory.buffers if array.array == hidden]
    assert len({(array.op_name.rpartition('/')[2], array.source) for array in found}) == len(found)
    assert max(array.count for array in found) == LAYERS
    assert all(array.nbytes == array.count * ROWS * HIDDEN // 8 * 4 for array in found)


def test_a_forecast_is_one_line_among_others_and_prints_as_its_table(made):
    assert re.fullmatch(r'<Forecast of train_step on v5e:2x4: .* MB of 15\.75 GiB>', repr(made))
    assert str(made) == str(forecast_table([made]))


def test_texts_have_no_folders_of_one_computer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f'add it at {tmp_path}/model.py:7 (/opt/lib/site-packages/flax/nn.py:30); no /tmp or a/b'
    assert shorten_sources(text) == 'add it at model.py:7 (flax/nn.py:30); no /tmp or a/b'
