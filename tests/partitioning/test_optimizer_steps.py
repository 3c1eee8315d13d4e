"""Steps of optax's optimizers over a mesh: against one device, at a fixed point, in bytes."""

import functools
import itertools
import math
import types
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import PjitPartitioner, check_compiled_once, check_fixed_point, unbox

pytestmark = pytest.mark.core

RULES = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('embed', 'data')]
RULES += [('layers', None)]
LAYERS, VOCAB, EMBED, MLP = 2, 32, 16, 64  # all different, so that a shape tells its dimensions
PARAMETERS = {  # path: (shape, ways that 4 x 2 devices split it), by hand
    'table': ((VOCAB, EMBED), 8),
    'layers/up': ((LAYERS, EMBED, MLP), 8),
    'layers/bias': ((LAYERS, MLP), 2),
}
TOKENS = np.arange(32, dtype=np.int32).reshape(8, 4)


def waves(key, shape, dtype=jnp.float32):
    """An initializer that compiles in no time: random numbers take longer than the step."""
    return jnp.sin(jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape) / 9


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        named = functools.partial(nn.with_logical_partitioning, waves)
        up = self.param('up', named(('embed', 'mlp')), (EMBED, MLP))
        bias = self.param('bias', named(('mlp',)), (MLP,))
        return x + (x @ up + bias) @ up.T, None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(waves, ('vocab', 'embed'))
        table = self.param('table', init, (VOCAB, EMBED))
        layers = nn.scan(
            Layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=LAYERS,
            unroll=LAYERS,  # compiles in less time than a loop
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x, _ = layers(name='layers')(table[tokens], None)
        return x @ table.T


def leaves_of(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator='/'): x for p, x in flat}


def _targets():
    rng = np.random.default_rng(0)
    signs = {path: rng.choice([-1.0, 1.0], shape) for path, (shape, _) in PARAMETERS.items()}
    return {path: s * rng.uniform(1, 2, s.shape).astype('float32') for path, s in signs.items()}


TARGETS = _targets()


def objective(params, tokens):
    """The model, and a pull that keeps gradients off 0, where Adam would amplify rounding."""
    pull = sum(jnp.sum((x - TARGETS[path]) ** 2) for path, x in leaves_of(params).items()) / 2
    return jnp.mean(jnp.square(Model().apply({'params': params}, tokens))) + pull


def by_rank(params):
    return jax.tree.map(lambda p: 'matrix' if p.ndim > 2 else 'other', params)


FACTORED = {'min_dim_size_to_factor': 8}
# optimizer, and how many statistics it keeps that are as large as their parameter
OPTIMIZERS = {
    'adamw': (lambda: optax.adamw(1e-2), 2 * 3),
    'sgd with momentum': (lambda: optax.sgd(1e-2, momentum=0.9), 3),
    'lion': (lambda: optax.lion(1e-2), 3),
    'adafactor': (lambda: optax.adafactor(1e-2, **FACTORED), 1),  # the bias is too small to factor
    'adafactor with momentum': (lambda: optax.adafactor(1e-2, momentum=0.9, **FACTORED), 1 + 3),
    'adafactor, not factored': (lambda: optax.adafactor(1e-2, factored=False), 3),
    'multi_transform': (
        lambda: optax.multi_transform(
            {'matrix': optax.adam(1e-2), 'other': optax.sgd(1e-2, momentum=0.9)}, by_rank
        ),
        2 * 1 + 2,
    ),
    'masked': (
        lambda: optax.masked(
            optax.adamw(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 2, params)
        ),
        2 * 1,
    ),
    'MultiSteps': (lambda: optax.MultiSteps(optax.adamw(1e-2), 2), 3 * 3),
    'inject_hyperparams': (
        lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
        2 * 3,
    ),
    'muon': (lambda: optax.contrib.muon(1e-2), 2 + 2 * 1),  # Adam for what is no matrix
    'schedule_free': (lambda: optax.contrib.schedule_free_adamw(1e-2), 2 * 3),
    'prodigy': (lambda: optax.contrib.prodigy(1.0), 4 * 3),
    'sm3': (lambda: optax.sm3(1e-2), 3),
    'novograd': (lambda: optax.novograd(1e-2), 3),
    'amsgrad': (lambda: optax.amsgrad(1e-2), 3 * 3),
    'adadelta': (lambda: optax.adadelta(1e-2), 2 * 3),
    'sophia': (lambda: optax.contrib.sophia(1e-2), 2 * 3),
    'lbfgs': (
        lambda: optax.lbfgs(
            memory_size=3, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=4)
        ),
        5 * 3,
    ),
    # Two of what it does not project, and the projector of a bias of 2 rows is no smaller.
    'galore': (lambda: optax.contrib.galore(1e-2, rank=4), 2 * 1 + 1),
}
EVERY_OPTIMIZER = pytest.mark.parametrize('name', OPTIMIZERS)


def functions(name):
    tx = optax.with_extra_args_support(OPTIMIZERS[name][0]())

    def init(key):
        params = Model().init(key, TOKENS[:1])['params']
        return {'params': params, 'opt_state': tx.init(unbox(params)), 'step': jnp.int32(0)}

    def step(state, tokens):
        value_fn = functools.partial(objective, tokens=tokens)
        value, grads = jax.value_and_grad(value_fn)(state['params'])
        # L-BFGS searches along a line, Sophia wants a Hessian: both need the objective itself.
        extra = {'value': value, 'grad': grads, 'value_fn': value_fn}
        extra = {'obj_fn': value_fn} if name == 'sophia' else extra
        updates, opt_state = tx.update(grads, state['opt_state'], state['params'], **extra)
        params = optax.apply_updates(state['params'], updates)
        return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}

    return tx, init, step


@functools.cache
def partitioner_of_4_by_2():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    return partitioner


@functools.cache
def params_on_one_device():
    return unbox(jax.jit(Model().init)(jax.random.key(0), TOKENS[:1])['params'])


@functools.cache
def run(name):
    """Two steps over the mesh and two on one device, with all that the tests look at."""
    partitioner, key = partitioner_of_4_by_2(), jax.random.key(0)
    tx, init, step = functions(name)
    named = jax.eval_shape(init, key)
    axes = partitioner.get_mesh_axes(named)
    state = partitioner.init(init, key)
    born = {path: x.sharding for path, x in leaves_of(state).items()}
    resources = (axes, partitioner.data_partition_spec)
    partitioned = partitioner.partition(step, resources, axes, donate_argnums=0)
    params = params_on_one_device()
    plain_state = {'params': params, 'opt_state': tx.init(params), 'step': jnp.int32(0)}
    # L-BFGS begins with weakly typed numbers, with which the step would compile twice.
    plain_state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), plain_state)
    plain_step = jax.jit(step)
    sharded, plain = [], []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter('error')  # jax warns of donated arrays that it cannot reuse
            state = partitioned(state, TOKENS)
        plain_state = plain_step(plain_state, TOKENS)
        sharded.append(leaves_of(jax.device_get(state)))
        plain.append(leaves_of(jax.device_get(plain_state)))
    return types.SimpleNamespace(
        named=named,
        axes=axes,
        born=born,
        state=state,
        step=partitioned,
        sharded=sharded,
        plain=plain,
    )


@pytest.fixture(autouse=True, scope='module')
def _quick_compilations():
    """Layouts are decided before the optimizations that this leaves out."""
    before = jax.config.values['jax_disable_most_optimizations']
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', before)


def same_along(sharding, shape):
    """The mesh axes along which devices hold the same part of an array, by its index map."""
    parts = {d.id: str(index) for d, index in sharding.devices_indices_map(shape).items()}
    mesh = partitioner_of_4_by_2().mesh
    held = np.vectorize(lambda device: parts[device.id])(mesh.devices)
    return {
        axis
        for place, axis in enumerate(mesh.axis_names)
        if (held == held.take([0], axis=place)).all()
    }


@EVERY_OPTIMIZER
def test_statistics_are_split_as_far_as_their_parameter(name):
    """Of every one that is as large; which is whose is read from its path."""
    result = run(name)
    checked = 0
    for path, array in result.plain[0].items():
        if path.startswith('opt_state/') and array.size >= 64:
            (owner,) = [p for p in PARAMETERS if f'/{p}/' in f'{path}/']
            shape = PARAMETERS[owner][0]
            if array.size >= math.prod(shape):
                of_parameter = same_along(result.born[f'params/{owner}'], shape)
                assert same_along(result.born[path], array.shape) <= of_parameter, path
                checked += 1
    assert checked == OPTIMIZERS[name][1]


def test_parameters_are_split_as_by_hand():
    """What the statistics are compared with."""
    born = run('adamw').born
    for path, (shape, ways) in PARAMETERS.items():
        assert math.prod(born[f'params/{path}'].shard_shape(shape)) * ways == math.prod(shape)


def test_gradients_are_well_conditioned():
    """The model has a part in them all, and none is so small that rounding would show."""
    params = params_on_one_device()
    gradients = leaves_of(jax.jit(jax.grad(objective))(params, TOKENS))
    for path, gradient in gradients.items():
        of_the_model = gradient - (leaves_of(params)[path] - TARGETS[path])
        assert float(jnp.abs(of_the_model).max()) > 0.05
        assert float(jnp.abs(gradient).min()) > 0.3


# Singular vectors move by rounding over the gap to the next singular value, here 1 in 12.
TOLERANCES = {'galore': 5e-5}


@EVERY_OPTIMIZER
def test_a_step_is_that_of_one_device(name):
    """After one step, and a second: MultiSteps updates nothing before.

    Errors are against the largest element of each array: one of 0 +- 1e-9 has none of its own.
    """
    result = run(name)
    for sharded, plain in zip(result.sharded, result.plain, strict=True):
        assert sharded.keys() == plain.keys()
        for path, expected in plain.items():
            tolerance = TOLERANCES.get(name, 1e-5) if expected.dtype.kind == 'f' else 0
            atol = tolerance * float(np.abs(expected).max(initial=0))
            np.testing.assert_allclose(sharded[path], expected, rtol=0, atol=atol, err_msg=path)
    first, second = result.plain
    moved = {path for path, x in first.items() if not np.array_equal(x, second[path])}
    assert {f'params/{path}' for path in PARAMETERS} <= moved


@EVERY_OPTIMIZER
def test_a_step_is_a_fixed_point(name):
    result = run(name)
    check_fixed_point(result.state, result.axes, partitioner_of_4_by_2().mesh)
    for path, array in leaves_of(result.state).items():
        assert array.sharding.is_equivalent_to(result.born[path], array.ndim), path
    check_compiled_once(result.step)


def bytes_of_a_device(state):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


@EVERY_OPTIMIZER
def test_audited_bytes_are_those_on_a_device(name):
    result = run(name)
    audit = partitioner_of_4_by_2().audit(result.state, result.named)
    assert audit.bytes_per_device == bytes_of_a_device(result.state)
    assert audit.bytes_total == sum(x.nbytes for x in jax.tree.leaves(result.state))
    assert not audit.misplaced


# Elements on a device: of one copy of all parameters, and of what a factored Adafactor keeps.
COPY = sum(math.prod(shape) // ways for shape, ways in PARAMETERS.values())
ROWS, COLUMNS, OTHERS = 16 // 4 + 2 * 16 // 4 + 1, 32 // 2 + 2 * 64 // 2 + 1, 1 + 1 + 2 * 64 // 2


@pytest.mark.parametrize(
    'name, elements',
    [
        ('sgd with momentum', 2 * COPY + 1),
        ('adamw', 3 * COPY + 2),
        ('adafactor', COPY + ROWS + COLUMNS + OTHERS + 2),
        ('adafactor with momentum', 2 * COPY + ROWS + COLUMNS + OTHERS + 3),
        ('sm3', 2 * COPY + (32 // 2 + 16 // 4) + (2 + 16 // 4 + 64 // 2) + (2 + 64 // 2) + 1),
    ],
)
def test_bytes_by_hand(name, elements):
    assert COPY == 64 + 256 + 64
    assert bytes_of_a_device(run(name).state) == 4 * elements


@pytest.mark.parametrize(
    'name, path, shape, spec',
    [
        ('sm3', '0/mu/table/0', (32,), P('model')),
        ('sm3', '0/mu/table/1', (16,), P('data')),
        ('sm3', '0/mu/layers/up/0', (2,), P(None)),
        ('sm3', '0/mu/layers/up/1', (16,), P('data')),
        ('sm3', '0/mu/layers/up/2', (64,), P('model')),
        ('sm3', '0/mu/layers/bias/0', (2,), P(None)),
        ('sm3', '0/mu/layers/bias/1', (64,), P('model')),
        ('lbfgs', '0/diff_params_memory/table', (3, 32, 16), P(None, 'model', 'data')),
        (
            'lbfgs',
            '0/diff_updates_memory/layers/up',
            (3, 2, 16, 64),
            P(None, None, 'data', 'model'),
        ),
        ('lbfgs', '0/diff_params_memory/layers/bias', (3, 2, 64), P(None, None, 'model')),
        ('lbfgs', '0/weights_memory', (3,), P(None)),
        ('galore', '0/projector/table', (32, 4), P('model', None)),
        ('galore', '0/base_optimizer_state/mu/table', (4, 16), P(None, 'data')),
        ('galore', '0/projector/layers/bias', (64, 2), P('model', None)),
        ('galore', '0/base_optimizer_state/nu/layers/bias', (2, 2), P(None, None)),
        ('galore', '0/projector/layers/up', (0, 0), P(None, None)),
        ('galore', '0/base_optimizer_state/nu/layers/up', (2, 16, 64), P(None, 'data', 'model')),
        ('sophia', '0/hessian_fn_state/key', (2,), P(None)),
        ('novograd', '0/nu/layers/up', (), P()),
    ],
)
def test_arrays_of_other_shapes_than_their_parameter(name, path, shape, spec):
    array = leaves_of(run(name).state)[f'opt_state/{path}']
    assert array.shape == shape
    expected = NamedSharding(partitioner_of_4_by_2().mesh, spec)
    assert array.sharding.is_equivalent_to(expected, array.ndim)


def box(shape, *names):
    return nn.LogicallyPartitioned(np.zeros(shape, 'float32'), names)


@pytest.mark.parametrize(
    'params, tx, expected',
    [
        pytest.param(
            {'w': box((16, 16), 'embed', 'mlp'), 'b': box((16,), 'mlp')},
            optax.sm3(1e-2),
            {'0/mu/w/0': P('data'), '0/mu/w/1': P('model'), '0/mu/b/0': P('model')},
            id='sm3 of a square',
        ),
        pytest.param(
            {'w': box((16, 16), 'embed', 'mlp')},
            optax.sm3(1e-2),
            {'0/mu/w/0': P('data'), '0/mu/w/1': P('model')},
            id='sm3 of one square',
        ),
        pytest.param(
            [box((16, 8), 'embed', None), box((8, 16), 'mlp', None)],
            optax.sm3(1e-2),
            {
                **{'0/mu/0/0': P('data'), '0/mu/0/1': P(None)},
                **{'0/mu/1/0': P('model'), '0/mu/1/1': P(None)},
            },
            id='sm3 of a list',
        ),
        pytest.param(
            [box((16, 8), 'embed', 'mlp'), box((8, 16), 'mlp', 'embed')],
            optax.contrib.muon(1e-2),
            {'inner_states/muon/inner_state/0/mu/1': P('model', 'data')},
            id='muon of a list',
        ),
        pytest.param(
            {'attention': {'key': box((16, 8), 'embed', 'mlp')}, 'b': box((8,), 'mlp')},
            optax.contrib.sophia(1e-2),
            {'0/hessian_fn_state/key': P(None), '0/mu/attention/key': P('data', 'model')},
            id="sophia's random key beside a parameter 'key'",
        ),
        pytest.param(
            {'w': box((2, 16, 8), 'layers', 'embed', 'mlp'), 's': box(())},
            optax.lbfgs(memory_size=2),
            {
                '0/diff_params_memory/w': P(None, None, 'data', 'model'),
                '0/diff_params_memory/s': P(None),
                '0/weights_memory': P(None),
            },
            id='as many histories as layers',
        ),
        pytest.param(
            {'u': box((8, 16), 'mlp', 'embed'), 'w': box((16, 8), 'embed', 'mlp')},
            optax.contrib.galore(1e-2, rank=4),
            {
                **{'0/projector/u': P('data', None), '0/projector/w': P('data', None)},
                '0/base_optimizer_state/mu/u': P('model', None),
                '0/base_optimizer_state/mu/w': P(None, 'model'),
            },
            id='galore of wide and tall',
        ),
    ],
)
def test_layouts_by_hand(params, tx, expected):
    def init():
        return {'params': params, 'opt_state': tx.init(unbox(params))}

    axes = partitioner_of_4_by_2().get_mesh_axes(jax.eval_shape(init))
    flat = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda x: isinstance(x, P))
    specs = {jax.tree_util.keystr(p, simple=True, separator='/'): x for p, x in flat}
    assert {path: specs[f'opt_state/{path}'] for path in expected} == expected


def test_every_combination_of_axes_occurs():
    """The comparisons above are not all of one kind of layout."""
    kinds = {
        frozenset(same_along(sharding, x.shape))
        for name in ('adafactor', 'sm3')
        for x, sharding in zip(
            leaves_of(run(name).state).values(), run(name).born.values(), strict=True
        )
    }
    axes = ('data', 'model')
    assert kinds == {frozenset(c) for n in range(3) for c in itertools.combinations(axes, n)}
