"""Explanations, audits, searches and goldens of functions that only jax knows."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import meshwright as mw
from meshwright.searching import list_meshes
from tests.meshwright.plain_steps import line_of

ROWS, WIDTH, HIDDEN = 64, 128, 256
ROOT = Path(__file__).parents[2]


def mesh_of(data, model):
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ('data', 'model'), axis_types=(AxisType.Auto,) * 2)


def make(mesh):
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(params, batch):
        def loss(params):
            hidden = jax.nn.relu(batch @ params['up'])
            return jnp.mean((hidden @ params['down']) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    params = {
        'up': struct((WIDTH, HIDDEN), None, 'model'),
        'down': struct((HIDDEN, WIDTH), 'model', None),
    }
    return train_step, (params, struct((ROWS, WIDTH), 'data'))


MESH = mesh_of(4, 2)
STEP, ARGS = make(MESH)


def test_an_explanation_has_the_rows_of_the_forecast():
    explained = mw.explain(STEP, *ARGS)
    made = explained.forecast
    sent = sum(row.nbytes for row in explained.exchanges)
    assert sent == pytest.approx(sum(c.total_bytes for c, _ in made.collectives)) and sent > 0
    first = explained.exchanges[0]
    # The gradients of 'up' and 'down' are summed over the rows: 2 * 3/4 of a half of each.
    gradients = 2 * 4 * WIDTH * HIDDEN // 2
    assert first.kind == 'all-reduce' and first.axes == ('data',)
    assert sent == pytest.approx(2 * 3 / 4 * gradients, rel=0.3)
    lines = {row.line.rpartition('/')[2] for row in explained.rows}
    assert line_of(make, "hidden @ params['down']") in lines
    text = str(explained)
    assert first.line in text and first.why.split()[0] in text
    assert max(map(len, text.splitlines())) <= 100
    assert first.line in explained._repr_html_()


def test_an_audit_has_what_jax_places():
    audit = mw.audit(STEP, *ARGS)
    placed = jax.device_put(jnp.zeros((WIDTH, HIDDEN)), ARGS[0]['up'].sharding)
    shard = placed.addressable_shards[0].data.nbytes
    assert [row.path for row in audit.arguments] == ['params/down', 'params/up', 'batch']
    assert [row.path for row in audit.results] == ['result/0/down', 'result/0/up', 'result/1']
    held = {'parameters': 2 * shard, 'batch': 4 * ROWS * WIDTH // 4, 'result': 2 * shard + 4}
    assert audit.bytes_per_device == {**held, 'optimizer': 0, 'other': 0}
    replicated = {row.path: row.replicated_over for row in audit.replicated}
    assert replicated['params/up'] == ('data',) and replicated['batch'] == ('model',)
    assert all('the result is laid' in row.reason for row in audit.results[:2])
    stated = mw.audit(STEP, *ARGS, compile=False)
    assert not stated.results and stated.arguments == audit.arguments
    assert 'params/up' in str(audit) and 'params/up' in audit._repr_html_()


def test_a_parameter_named_value_keeps_its_name():
    """Attributes `.value` of variables are left out; keys and modules of that name are not."""
    nnx = pytest.importorskip('flax.nnx')

    class Attention(nnx.Module):
        def __init__(self):
            self.value = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.value(x)

    x = jax.ShapeDtypeStruct((8, 16), 'float32')
    with jax.set_mesh(jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))):
        module = mw.audit(nnx.jit(lambda model, x: model(x)), Attention(), x)
        tree = {'value': x}
        mapped = mw.audit(jax.jit(lambda params, x: params['value'] + x), tree, x)
    assert module.arguments[0].path == 'model/value/kernel'
    assert mapped.arguments[0].path == 'params/value'


def test_what_is_lowered_or_compiled_already():
    lowered = STEP.lower(*ARGS)
    compiled = lowered.compile()
    made, whole = mw.forecast(compiled), mw.forecast(STEP, *ARGS)
    assert made.function == 'train_step' and made.arrays == whole.arrays
    for name in ('peak', 'arguments', 'parameters', 'batch', 'temporaries', 'live'):
        assert getattr(made.memory, name) == getattr(whole.memory, name)
    assert [c for c, _ in made.collectives] == [c for c, _ in whole.collectives]
    assert made.time is None and not any(cause for _, cause in made.collectives)
    assert mw.forecast(lowered).memory == made.memory
    assert mw.explain(compiled).exchanges[0].line
    assert mw.audit(compiled).bytes_per_device == mw.audit(STEP, *ARGS).bytes_per_device
    assert mw.Forecast.from_json(made.to_json()).memory == made.memory
    assert 'no trace of the program' in mw.render_page(made)


COMPILED = jax.jit(lambda x: x).lower(ARGS[1]).compile()
ONE_DEVICE = jax.jit(lambda x: x).lower(1.0).compile()


@pytest.mark.parametrize(
    ('misuse', 'message'),
    [
        (lambda: mw.lint(COMPILED), '^a compiled function has no trace, which lint reads: pass'),
        (lambda: mw.forecast(COMPILED, topology='v5e:2x4'), '^a compiled function is for one mach'),
        (lambda: mw.forecast(COMPILED, compile=False), '^a compiled function has no trace, from'),
        (lambda: mw.explain(COMPILED, 1), '^a compiled function has its arguments already'),
        (lambda: mw.audit(ONE_DEVICE), 'has no mesh: no argument or result of the compiled'),
        (lambda: mw.forecast(STEP, *ARGS, axes={'data': 8}), "name it, such as topology='v5p"),
        (lambda: mw.lint(lambda x: x, 1.0), r'is not jitted: pass jax.jit\('),
        (lambda: mw.search(make, topology='v5e:2x4', axes='data'), "^axes='data' must be names"),
        (
            lambda: mw.search(make, topology='v5e:2x4', axes={'data': 3, 'model': -1}),
            '^v5e:2x4 has 8 devices, of which no mesh has',
        ),
        (
            lambda: mw.search(make, topology='v5e:2x4', axes={'data': 0.5, 'model': -1}),
            "^the axis 'data' has sizes 0.5",
        ),
        (
            lambda: mw.search(lambda mesh: 1, topology='v5e:2x4', axes=['data'], on_cpu=True),
            r'^none of 1 meshes can be used; data 8: <lambda> returned int: return the jitted',
        ),
        (lambda: mw.search(make, topology='v9:2x4', axes=['data']), 'v9'),
        (lambda: mw.place(make, topology='v5e:2x4', axes={'data': 3}), '3'),
    ],
)
def test_misuses_say_in_one_line_what_to_write(misuse, message):
    with pytest.raises(ValueError, match=message) as caught:
        misuse()
    assert '\n' not in str(caught.value)


def test_the_meshes_of_a_machine():
    two = list(list_meshes(8, ['a', 'b']))
    assert two == [{'a': 1, 'b': 8}, {'a': 2, 'b': 4}, {'a': 4, 'b': 2}, {'a': 8, 'b': 1}]
    # 64 = 2**6 in three factors: as many as 6 items in 3 boxes, 8! / (6! 2!).
    assert len(list(list_meshes(64, ['a', 'b', 'c']))) == 28
    chosen = list(list_meshes(12, {'a': [2, 3, 5], 'b': -1, 'c': 2}))
    assert chosen == [{'a': 2, 'b': 3, 'c': 2}, {'a': 3, 'b': 2, 'c': 2}]


@pytest.mark.parametrize('compile', [False, True])
def test_a_search_ranks_what_forecasts_say(compile):
    def only_small(mesh):
        if mesh.shape['model'] == 8:
            raise ValueError('model 8 is too many\nfor this model')
        return make(mesh)

    found = mw.search(
        only_small, topology='v5e:2x4', axes=['data', 'model'], compile=compile, on_cpu=True
    )
    assert found.failed == {'data 1 x model 8': 'model 8 is too many'}
    sent = {}
    for sizes in ((2, 4), (4, 2), (8, 1)):
        fn, args = make(mesh_of(*sizes))
        sent[sizes] = sum(
            c.total_bytes for c, _ in mw.forecast(fn, *args, compile=compile).collectives
        )
    if compile:
        ranked = [tuple(one.mesh.values()) for one in found.forecasts]
        assert ranked == sorted(sent, key=sent.get)
    assert {tuple(one.mesh.values()) for one in found.forecasts} == {*sent}
    text = str(found)
    assert 'not possible: data 1 x model 8: model 8 is too many' in text
    assert f'data {found.best.mesh["data"]} x model' in found._repr_html_()


def test_goldens_of_functions_that_are_made_for_a_mesh(tmp_path, monkeypatch):
    monkeypatch.delenv('CI', raising=False)
    made = mw.place(make, topology='v5e:2x4', axes={'data': -1, 'model': 2}, on_cpu=True)
    mw.golden(*made, folder=tmp_path)
    [file] = tmp_path.iterdir()
    assert json.loads(file.read_text())['mesh'] == {'data': 4, 'model': 2}
    mw.golden(STEP, *ARGS, folder=tmp_path)
    other = mw.place(make, topology='v5e:2x4', axes={'data': 2, 'model': 4}, on_cpu=True)
    with pytest.raises(AssertionError, match='mesh: data 4 x model 2 -> data 2 x model 4'):
        mw.golden(*other, folder=tmp_path)
    mw.golden(STEP, *ARGS, topology=['v5e:2x4'], on_cpu=True, folder=tmp_path / 'machines')
    assert (tmp_path / 'machines/train_step.v5e-2x4.json').exists()


def test_a_forecast_draws_itself_in_a_notebook():
    drawn = mw.forecast(STEP, *ARGS)._repr_html_()
    again = mw.forecast(STEP, *ARGS)._repr_html_()
    assert 'train_step on cpu:8' in drawn and drawn == again  # without what it took itself
    assert '<script' not in drawn and drawn.count('<div') == drawn.count('</div')


@pytest.mark.long
def test_questions_need_neither_flax_nor_optax():
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}')

sys.meta_path.insert(0, Refuse())
import jax
jax.config.update('jax_num_cpu_devices', 8)
import meshwright as mw
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.ShapeDtypeStruct((64, 128), 'float32', sharding=NamedSharding(mesh, P('data')))
step = mw.watch(jax.jit(lambda x: (x @ x.T).sum()))
print(mw.explain(step, x), mw.audit(step, x), mw.lint(step, x), mw.forecast(step, x))
mw.render_page(mw.forecast(step, x)), mw.forecast(step, x)._repr_html_()
"""
    names = ('flax', 'optax', 'gin', 'absl', 'orbax', 'equinox', 'rich', 'matplotlib')
    out = subprocess.run(
        [sys.executable, '-c', code.format(names=names)], cwd=ROOT, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert '<lambda> on cpu:8' in out.stdout and 'no findings' in out.stdout


@pytest.mark.parametrize('ask', [mw.lint, mw.forecast, mw.audit, mw.golden])
def test_an_error_of_the_function_has_the_lines_of_the_program_only(ask):
    @jax.jit
    def step(x):
        return x @ jnp.ones((WIDTH + 1, 2))

    with pytest.raises(TypeError, match='contracting dimension') as error:
        ask(step, ARGS[1])
    files = [str(entry.path) for entry in error.traceback]
    assert files == [__file__, __file__]
    assert error.traceback[-1].name == 'step'
