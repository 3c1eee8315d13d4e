"""What is left out when a program is read changes no answer, and nothing is done twice."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshwright import forecast
from meshwright.jaxpr import implied_exchanges, layouts

ROWS, WIDTH, LAYERS = 32, 64, 3


def make_step():
    """A scan with residuals over two axes, a loss, and its gradients."""
    types = (AxisType.Auto,) * 2
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ('data', 'model'), axis_types=types)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    def step(w, x, scale):
        def layer(x, w):
            x = x + jax.nn.gelu(x * scale[..., :1] @ w['up']) @ w['down']
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data'))), None

        def loss(w):
            return jnp.mean(jax.scipy.special.logsumexp(jax.lax.scan(layer, x, w)[0], axis=-1))

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    w = {
        'up': struct((LAYERS, WIDTH, 4 * WIDTH), None, 'data', 'model'),
        'down': struct((LAYERS, 4 * WIDTH, WIDTH), None, 'model', 'data'),
    }
    x = struct((ROWS, WIDTH), ('data', 'model'))
    return jax.jit(step, donate_argnums=0), (w, x, struct((ROWS, 1), 'data'))


def answer(**settings):
    fn, args = make_step()
    made = forecast(fn, *args, **settings).as_dict()
    return made.pop('compilation') and made


def test_operations_that_are_settled_are_left_out_and_the_answer_is_the_same(monkeypatch):
    skipped, is_settled = [], layouts.is_settled

    def never(step, factors):
        skipped.append(is_settled(step, factors))
        return False

    made = answer()
    for module in (layouts, implied_exchanges):
        monkeypatch.setattr(module, 'is_settled', never)
    assert answer() == made
    assert sum(skipped) > len(skipped) / 4  # so it is worth it


def test_a_compiler_writes_its_program_once(monkeypatch):
    counted, write = [], jax.stages.Compiled.as_text

    def as_text(compiled):
        counted.append(compiled)
        return write(compiled)

    monkeypatch.setattr(jax.stages.Compiled, 'as_text', as_text)
    answer()
    assert len(counted) == 1


def test_the_search_for_cycles_goes_on_after_a_forecast(monkeypatch):
    seen = []

    def fail(*args, **settings):
        seen.append(gc.isenabled())
        raise KeyError('a defect')

    monkeypatch.setattr('meshwright.forecasting.describe_program', fail)
    with pytest.raises(KeyError, match='a defect'):
        answer()
    assert seen == [False] and gc.isenabled()
