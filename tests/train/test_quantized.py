"""Products in 8 bits: which have them, how far their results may be off, and what is refused."""

import collections
import dataclasses
import importlib
import inspect
import string

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from small import model, small_config

from partitioning import products, unbox
from partitioning.products.flops import bodies_of, open_jaxpr
from train import NextToken, QuantizedProducts, quantize, train
from train.errors import ConfigError
from train.models import forward
from train.objectives.modules import as_model

pytest.importorskip('qwix', reason="pip install 'meshwright[quantization]'")
INT8, FLOAT8 = (QuantizedProducts(dtype=dtype) for dtype in ('int8', 'float8'))
TOKENS = np.arange(32).reshape(2, 16) % 7


def count_types(function, *args):
    """The products of a function by the types of their operands, without those of other types."""
    found = collections.Counter()

    def visit(jaxpr):
        for equation in open_jaxpr(jaxpr)[0].eqns:
            types = [v.aval.dtype for v in equation.invars[:2]]
            if equation.primitive.name == 'dot_general' and types[0].itemsize == 1:
                found[' '.join(t.name for t in types)] += 1
            for body in bodies_of(equation):
                visit(body)

    visit(jax.make_jaxpr(function)(*args))
    return found


def gradients_of(net, params):
    """A function of the parameters with its loss and gradients."""
    adapted = as_model(net)

    def loss(params):
        return jnp.mean(adapted.apply({'params': params}, None, TOKENS).outputs ** 2)

    return jax.value_and_grad(loss), params


def init(net):
    return unbox(as_model(net).init(jax.random.key(0), TOKENS))['params']


# The error of rounding a number: relative to it, and relative to the largest one with its scale,
# among which float types also have numbers too small for their relative precision.
ERRORS = {
    (INT8, False): (0.0, 0.5 / 127),
    (INT8, True): (0.0, 0.5 / 127),
    (FLOAT8, False): (2**-4, 2**-10 / 448),
    (FLOAT8, True): (2**-3, 2**-17 / 57344),
}


def error_of(rounding, x, axis, gradient=False):
    relative, of_largest = ERRORS[rounding, gradient]
    return relative * abs(x) + of_largest * abs(x).max(axis, keepdims=True)


@pytest.mark.parametrize('sharded', [False, True])
@pytest.mark.parametrize('rounding', [INT8, FLOAT8], ids=['int8', 'float8'])
def test_a_product_and_its_gradients_are_off_by_what_rounding_explains(rounding, sharded):
    """The bounds add up the errors of all summands, so each element must keep its own."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape) for shape in ((8, 4, 24), (24, 6, 16), (8, 4, 6, 16)))
    x *= np.exp(rng.normal(size=(8, 4, 1)) * 2)  # rows of different sizes have their own scales

    def product(x, w):
        names = ('batch', None, 'embed'), ('embed', None, None)
        return products.multiply('BLD,DHN->BLHN', x, w, *names, rounding=rounding)

    def all_three(x, w, dy):
        y, back = jax.vjp(product, x, w)
        return y, *back(dy)

    arrays = [jnp.asarray(a, jnp.float32) for a in (x, w, dy)]
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    if sharded:
        with jax.set_mesh(mesh), nn.logical_axis_rules([('batch', 'data'), ('embed', 'data')]):
            spec = jax.sharding.PartitionSpec('data')
            places = (jax.sharding.NamedSharding(mesh, spec),) * 3
            compiled = jax.jit(all_three, in_shardings=places).lower(*arrays).compile()
            y, dx, dw = compiled(*(jax.device_put(a, places[0]) for a in arrays))
        gathered = [line for line in compiled.as_text().split('\n') if ' all-gather(' in line]
        # CPUs gather float8 as float16.
        kind = 's8' if rounding is INT8 else 'f16'
        assert gathered and all(f' = {kind}[' in line for line in gathered)
    else:
        y, dx, dw = jax.jit(all_three)(*arrays)

    def sums(equation, *pairs):
        """The sum of the errors of all summands, each the product of two numbers with errors."""
        (a, da), (b, db) = [(abs(value), error) for value, error in pairs]
        return np.einsum(equation, a, db) + np.einsum(equation, da, b + db)

    of_x, of_w = error_of(rounding, x, 2), error_of(rounding, w, 0)
    scale_x, scale_w = abs(x).max(2, keepdims=True), abs(w).max(0)
    of_rows = error_of(rounding, dy * scale_w, (2, 3), gradient=True) / scale_w
    of_columns = error_of(rounding, dy * scale_x[..., None], (0, 1), gradient=True)
    of_columns /= scale_x[..., None]
    with np.errstate(all='raise'):
        expected = {
            'y': (y, 'BLD,DHN->BLHN', (x, of_x), (w, of_w)),
            'dx': (dx, 'BLHN,DHN->BLD', (dy, of_rows), (w, of_w)),
            'dw': (dw, 'BLD,BLHN->DHN', (x, of_x), (dy, of_columns)),
        }
        for name, (found, equation, *pairs) in expected.items():
            exact = np.einsum(equation, *(value for value, _ in pairs))
            off = abs(np.asarray(found, np.float64) - exact)
            assert (off <= 1.001 * sums(equation, *pairs) + 1e-5).all(), name
            assert off.max() > 1e-4 * abs(exact).max(), f'{name} is not rounded'


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_all_products_of_layers_have_8_bits_forwards_and_backwards(remat):
    plain = model(remat=remat)
    count = 7 * 3 + 6 * (remat == 'full')  # the last product of a layer is not computed again

    def change(products):
        return model(remat=remat, products=products)

    params = init(plain)
    assert count_types(*gradients_of(plain, params)) == {}
    assert count_types(*gradients_of(change(INT8), params)) == {'int8 int8': count}
    e4m3, e5m2 = 'float8_e4m3fn', 'float8_e5m2'
    of_floats = {f'{e4m3} {e4m3}': count - 14, f'{e5m2} {e4m3}': 7, f'{e4m3} {e5m2}': 7}
    assert count_types(*gradients_of(change(FLOAT8), params)) == of_floats
    only_mlp = dataclasses.replace(INT8, except_for=['attention/.*'])
    kept = 3 * 3 + 2 * (remat == 'full')
    assert count_types(*gradients_of(change(only_mlp), params)) == {'int8 int8': kept}


def test_decoding_has_the_products_of_the_training():
    net = model(products=INT8)
    cache = forward.empty_cache(net.config, 2, 16)
    logits = count_types(
        lambda params: forward.compute_logits(
            net.config,
            params,
            TOKENS,
            cache=cache,
            positions_BL=jnp.arange(16)[None],
            segments_BL=jnp.ones_like(TOKENS),
        )[0],
        init(net),
    )
    assert logits == {'int8 int8': 7}


class Block(nn.Module):
    """A layer in the style of other people: attention, and an MLP with square kernels."""

    @nn.compact
    def __call__(self, x, _):
        x += nn.MultiHeadDotProductAttention(2, name='attention')(x)
        hidden = nn.Einsum((16, 16), 'abc,cd->abd', name='up')(x)
        return x + nn.Dense(16, name='down')(nn.relu(hidden)), None


class Others(nn.Module):
    scanned: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 16, name='embed')(tokens)
        if self.scanned:
            layers = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}, 'length': 2}
            x, _ = nn.scan(nn.remat(Block, prevent_cse=False), **layers)(name='layers')(x, None)
        else:
            x, _ = Block(name='layer')(x, None)
        return nn.Dense(7, name='logits')(x)


class OthersInNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 16, rngs=rngs)
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.down = nnx.Linear(16, 16, rngs=rngs)
        self.logits = nnx.Linear(16, 7, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.logits(x + self.down(nnx.relu(self.up(x))))


@pytest.mark.parametrize(
    ('net', 'forwards', 'again'),
    [(Others(scanned=False), 6, 0), (Others(), 6, 6), (OthersInNnx, 2, 0)],
    ids=['linen', 'scanned', 'nnx'],
)
@pytest.mark.parametrize('settings', [INT8, FLOAT8], ids=['int8', 'float8'])
def test_models_of_others_keep_their_parameters(net, forwards, again, settings):
    """Attention, embeddings and the output layer keep their products."""
    found = quantize(net, settings)
    params = init(net)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, init(found))
    assert all(jax.tree.leaves(same))
    counts = count_types(*gradients_of(found, params))
    assert sum(counts.values()) in (3 * forwards, 3 * forwards + again - 1, 3 * forwards + again)
    kept = dataclasses.replace(settings, except_for=['.*'])
    assert not count_types(*gradients_of(quantize(net, kept), params))
    # Each of a few products in a row adds its own error to a gradient.
    largest = forwards * (2**-3 if settings is FLOAT8 else 2 / 127)
    (_, exact), (_, rounded) = (
        jax.jit(function)(params)
        for function, _ in (gradients_of(net, params), gradients_of(found, params))
    )
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (exact, rounded)]
    assert 0 < np.linalg.norm(flat[1] - flat[0]) < largest * np.linalg.norm(flat[0])


def test_a_run_resumes_with_the_same_bits(tmp_path):
    (tmp_path / 'a.txt').write_text(string.printable * 40)
    settings = {'objective': NextToken(model=model(products=INT8)), 'evaluators': {}}

    def run(name, **changes):
        return train(small_config(tmp_path / name, tmp_path, **settings, **changes))

    whole = run('whole', total_steps=4)
    run('parts', total_steps=2)
    resumed = run('parts', total_steps=4)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert (jax.device_get(a) == jax.device_get(b)).all()


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'dtype': 'int4'}, r"dtype is 'int4': use 'int8' or 'float8'"),
        ({'dtype': 'int8', 'except_for': 'mlp'}, r"except_for is 'mlp': write \['mlp'\]"),
        ({'dtype': 'int8', 'except_for': ['(']}, r"except_for has '\(', which is not a regular"),
    ],
)
def test_settings_that_are_wrong_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizedProducts(**settings)


@pytest.mark.parametrize(
    ('kind', 'settings', 'instead'),
    [
        ('TPU v4', INT8, 'v4 does not multiply it faster .*v5e.*: remove it'),
        ('TPU v5 lite', FLOAT8, "v5e does not multiply it .*tpu7x.*: write dtype = 'int8'"),
        ('TPU7x', INT8, "tpu7x does not multiply it .*: write dtype = 'float8'"),
        ('TPU v5 lite', INT8, None),
    ],
)
def test_a_chip_without_such_products_is_named(kind, settings, instead):
    known = inspect.signature(AbstractDevice).parameters  # jax 0.9 has no platform here
    figures = {'device_kind': kind, 'num_cores': 1, 'platform': 'tpu'}
    device = AbstractDevice(**{k: v for k, v in figures.items() if k in known})
    mesh = AbstractMesh((1,), ('data',), (AxisType.Auto,), abstract_device=device)

    def trace():
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(lambda x: settings.round(x, (0,), gradient=False), jnp.ones((8, 8)))

    if instead is None:
        return trace()
    with pytest.raises(ConfigError, match=instead):
        trace()


def test_models_that_cannot_have_them_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r'set TransformerConfig\.products'):
        quantize(model(), INT8)
    with pytest.raises(ConfigError, match='a model of type int'):
        quantize(3, INT8)
    monkeypatch.setattr(importlib, 'import_module', _missing)
    with pytest.raises(ConfigError, match=r"the package qwix: pip install 'meshwright\[quant"):
        QuantizedProducts(dtype='int8')


def _missing(name):
    raise ImportError(name)
