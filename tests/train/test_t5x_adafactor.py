"""T5X's Adafactor: its factoring, its arithmetic against numpy, and its layout over a mesh."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_reference
from flax import linen as nn
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import ModelParamTraversal
from tolerances import assert_equal_but_for_rounding, rounding_spread

from partitioning import PjitPartitioner, TrainState, standard_logical_axis_rules, unbox
from partitioning.state import path_str
from train.checkpoints.formats.t5x_files import read_arrays
from train.errors import ConfigError
from train.models.t5 import T5, T5Config
from train.optimizers import as_transformation
from train.optimizers.factored import FactorDim
from train.t5x.adafactor import HEURISTIC_RULE, Adafactor, HParamMap, standard_logical_factor_rules
from train.t5x.optimizers import MultiOptimizer, adamw, lion, sgd, with_learning_rate

pytestmark = pytest.mark.core

# Parameters of T5X's networks -> shape, logical axes, and by T5X's rules: the rows, the columns and
# the batch dimensions, with dimensions of at least 16 factored by size.
PARAMETERS = {
    'wi': ((32, 64), 'embed mlp', (0,), (1,), ()),
    'wo': ((64, 32), 'mlp embed', (1,), (0,), ()),
    'query': ((32, 32), 'embed joined_kv', (0,), (1,), ()),
    'small': ((8, 64), 'embed mlp', (), (), ()),
    'rel_embedding': ((4, 32), 'heads relpos_buckets', (), (), ()),
    'scale': ((32,), 'embed', (), (), ()),
    'scan_scale': ((32, 4), 'embed layers', (), (), (1,)),
    'scan_query': ((48, 4, 4, 16), 'embed layers heads kv', (0,), (2, 3), (1,)),
    'scan_out': ((4, 4, 16, 48), 'heads layers kv embed', (3,), (0, 2), (1,)),
    'scan_wi': ((4, 2, 8), 'embed layers mlp', (0,), (2,), (1,)),
    'scan_relpos': ((4, 2, 8), 'heads layers relpos_buckets', (), (), (1,)),
}
NAMES = {name: tuple(axes.split()) for name, (_, axes, *_) in PARAMETERS.items()}
RULES = {'logical_factor_rules': standard_logical_factor_rules(), 'min_dim_size_to_factor': 16}


def boxed():
    key = jax.random.key(0)
    return {
        name: nn.LogicallyPartitioned(jax.random.normal(key, shape), NAMES[name])
        for name, (shape, *_) in PARAMETERS.items()
    }


def oracle(x, grads, dims, rate, s):
    """The parameter and its second moments after several updates, in float64, by the paper."""
    rows, columns, batch = dims
    rest = tuple(d for d in range(x.ndim) if d not in batch)

    def rms(a):
        return np.sqrt(np.square(a).mean(rest, keepdims=True))

    r = c = v = m = 0.0
    for t, g in enumerate(grads):
        if limit := s.get('global_norm_clip_threshold'):
            g = g * min(1.0, limit / s['norms'][t])
        lr = rate(t)
        age = max(t - s.get('step_offset', 0), 0) + 1
        beta = 1 - age ** -s.get('decay_rate', 0.8)
        square = g**2 + s.get('epsilon1', 1e-30)
        if rows:
            r = beta * r + (1 - beta) * square.mean(columns, keepdims=True)
            c = beta * c + (1 - beta) * square.mean(rows, keepdims=True)
            u = g / np.sqrt(r / r.mean(rows, keepdims=True) * c)
        else:
            v = beta * v + (1 - beta) * square
            u = g / np.sqrt(v)
        if clip := s.get('clipping_threshold', 1.0):
            u = u / np.maximum(1, rms(u) / clip)
        scale = np.clip(rms(x), s.get('epsilon2', 1e-3), s.get('max_parameter_scale') or np.inf)
        u = lr * u * (scale if s.get('multiply_by_parameter_scale', True) else 1)
        if b := s.get('beta1'):
            u = m = b * m + (1 - b) * u
        decay = s.get('weight_decay_rate') or 0.0
        if (power := s.get('weight_decay_rate_lr_exponent')) is not None:
            decay = (decay or 1.0) * lr**power
        x = (1 - decay) * x - u
    found = {'v_row': r, 'v_col': c, 'v': v, 'm': m}
    dropped = {'v_row': columns, 'v_col': rows, 'v': (), 'm': ()}
    return x, {n: np.squeeze(a, dropped[n]) if np.ndim(a) else None for n, a in found.items()}


VARIANTS = {
    'default': {},
    'beta1 and weight decay': {'beta1': 0.9, 'weight_decay_rate': 0.01},
    'no scale': {
        'multiply_by_parameter_scale': False,
        'clipping_threshold': None,
        'global_norm_clip_threshold': 0.5,
    },
    'exponent': {
        'decay_rate': 0.9,
        'weight_decay_rate_lr_exponent': 2.0,
        'max_parameter_scale': 0.1,
        'epsilon1': 1e-4,
        'epsilon2': 0.01,
    },
    'offset': {'step_offset': 1, 'weight_decay_rate': 0.5, 'weight_decay_rate_lr_exponent': 1.0},
}


@pytest.mark.parametrize('variant', VARIANTS)
def test_updates_and_statistics_equal_numpy(variant):
    def rate(step):
        return 0.1 / (step + 1)

    settings = VARIANTS[variant]
    tx = as_transformation(Adafactor(**RULES, **settings).optimizer(rate), boxed())
    params = start = unbox(boxed())
    grads = [
        {n: jax.random.normal(jax.random.key(10 * t), x.shape) for n, x in params.items()}
        for t in range(3)
    ]
    state = tx.init(params)
    for grad in grads:
        updates, state = jax.jit(tx.update)(grad, state, params)
        params = jax.tree.map(jax.numpy.add, params, updates)
    assert int(state.step) == 3
    arrays = [{n: np.asarray(g, np.float64) for n, g in grad.items()} for grad in grads]
    norms = [np.sqrt(sum(np.square(g).sum() for g in a.values())) for a in arrays]
    for name, (_, _, *dims) in PARAMETERS.items():
        x = np.asarray(start[name], np.float64)
        given = [a[name] for a in arrays]
        expected, statistics = oracle(x, given, dims, rate, {**settings, 'norms': norms})
        np.testing.assert_allclose(params[name], expected, rtol=2e-5, atol=2e-6, err_msg=name)
        for statistic, value in statistics.items():
            found = np.asarray(getattr(state, statistic)[name])
            if value is None:  # T5X's placeholder
                assert found.shape == (1,) and found.dtype == np.float32 and not found.any()
            else:
                assert found.shape == value.shape, (name, statistic)
                np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-8, err_msg=name)


def test_nan_updates_are_skipped_one_by_one():
    params = {'w': np.ones((2, 3), np.float32)}
    grad = {'w': np.float32([[1, np.nan, 1], [1, 1, 1]])}
    tx = as_transformation(Adafactor(skip_nan_updates=True, beta1=0.9).optimizer(lambda s: 0.1))
    good, _ = tx.update({'w': np.ones((2, 3), np.float32)}, tx.init(params), params)
    assert (np.asarray(good['w']) != 0).all()
    # The clipping makes all of the first update NaN, and without it only one element.
    for settings, kept in (({}, 6), ({'clipping_threshold': None}, 1)):
        tx = as_transformation(Adafactor(skip_nan_updates=True, **settings).optimizer(lambda s: 1))
        updates, state = tx.update(grad, tx.init(params), params)
        assert (np.asarray(updates['w']) == 0).sum() == kept
        assert np.isfinite(state.v['w']).all()
        plain = as_transformation(Adafactor(**settings).optimizer(lambda s: 1))
        assert np.isnan(plain.update(grad, plain.init(params), params)[0]['w']).sum() == kept


# Which settings decide the factoring.


def shapes(adafactor, params=None):
    """The shape of v_row of each parameter; (1,) without factors."""
    tx = as_transformation(adafactor.optimizer(lambda step: 0.1), params or boxed())
    state = jax.eval_shape(tx.init, unbox(params or boxed()))
    return {name: x.shape for name, x in state.v_row.items()}


def test_a_factor_map_chooses_by_path_and_logical_rules_win():
    three = {'fused': nn.LogicallyPartitioned(np.ones((8, 4, 2), np.float32), (None,) * 3)}
    rule = HParamMap([('^fu', ('row', 'column', FactorDim.BATCH)), ('', None)])
    assert shapes(Adafactor(factor_map=rule), three) == {'fused': (8, 2)}
    assert shapes(Adafactor(factor_map=HParamMap([('', None)])))['wi'] == (1,)
    by_size = HParamMap([('scan', None), ('', HEURISTIC_RULE)])
    found = shapes(Adafactor(factor_map=by_size, min_dim_size_to_factor=16))
    assert (found['wi'], found['scan_query'], found['small']) == ((32,), (1,), (1,))
    assert shapes(Adafactor(factor_map=by_size, **RULES))['scan_query'] == (48, 4)
    assert set(shapes(Adafactor(**RULES, factored=False)).values()) == {(1,)}


def test_the_scale_of_some_parameters():
    scaled = HParamMap([('wi$', True), ('.*', False)])
    params, rate = unbox(boxed()), 0.5
    updates = {}
    for value in (scaled, True, False):
        adafactor = Adafactor(**RULES, multiply_by_parameter_scale=value)
        tx = as_transformation(adafactor.optimizer(lambda step: rate), boxed())
        updates[value], _ = jax.jit(tx.update)(params, tx.init(params), params)
    for name in PARAMETERS:
        alike = updates[name.endswith('wi')][name]
        np.testing.assert_array_equal(updates[scaled][name], alike, err_msg=name)
        assert not np.allclose(updates[True][name], updates[False][name])


def test_names_in_params_axes_decide_as_well():
    """T5X's networks keep the names in a collection of their own."""
    variables = {
        'params': {'kernel': np.ones((4, 2, 8), np.float32)},
        'params_axes': {'kernel_axes': AxisMetadata(('embed', 'layers', 'mlp'))},
    }
    tx = as_transformation(Adafactor(**RULES).optimizer(lambda step: 0.1), variables)
    assert tx.init(variables['params']).v_row['kernel'].shape == (4, 2)


@pytest.mark.parametrize(
    'axes, rules, words',
    [
        (('embed', 'mpl', 'layers'), {}, ["'mpl'", "Did you mean 'mlp'?"]),
        (('embed', 'mlp', 'relpos_buckets'), {}, ['embed', 'row, column or batch']),
        (('embed', 'mlp', 'layers'), {'logical_factor_rules': None}, ['more than two dimensions']),
    ],
)
def test_parameters_that_cannot_be_factored(axes, rules, words):
    params = {'w': nn.LogicallyPartitioned(np.ones((2, 3, 4), np.float32), axes)}
    tx = as_transformation(Adafactor(**RULES | rules).optimizer(lambda step: 0.1), params)
    with pytest.raises(ConfigError) as error:
        tx.init(unbox(params))
    assert all(word in str(error.value) for word in ['w', *words])


def test_a_map_without_a_rule_is_an_error():
    with pytest.raises(ConfigError, match=r"no rule matches 'scale'"):
        HParamMap([('kernel', True)])['scale']


# Layout.


@pytest.mark.parametrize('model_partitions', [2, 4])
def test_statistics_have_the_layout_of_their_dimensions(model_partitions):
    """On 4x2 and 2x4; in scan_out, 4 layers cannot be told from 4 heads by their sizes."""
    tx = as_transformation(Adafactor(**RULES).optimizer(lambda step: 0.1), boxed())
    rules = standard_logical_axis_rules(2, 2)
    partitioner = PjitPartitioner(num_partitions=model_partitions, logical_axis_rules=rules)
    plan = partitioner.plan(lambda key: TrainState.create(boxed(), tx), jax.random.key(0))
    assert dict(partitioner.mesh.shape) == {
        'data': 8 // model_partitions,
        'model': model_partitions,
    }
    specs = plan.specs.opt_state
    sharded = 0
    for name, (_, _, rows, columns, _) in PARAMETERS.items():
        parameter = [*plan.specs.params[name]]
        for statistic, dropped in (('v_row', columns), ('v_col', rows), ('v', ())):
            spec = [*getattr(specs, statistic)[name]]
            if (statistic == 'v') == bool(rows):
                assert spec == [None], 'a placeholder is replicated'
                continue
            assert spec == [a for d, a in enumerate(parameter) if d not in dropped], statistic
            sharded += any(spec)
    assert sharded == 17  # two statistics of 6 factored parameters, one of the 5 others


# T5X itself.


@pytest.fixture(scope='module')
def t5x_model():
    """T5X's small model at step 0: its parameters, its boxes, and its loss with gradients."""
    facts, arrays = t5x_reference.facts('t5_1_1'), t5x_reference.arrays('t5_1_1')
    net = T5(T5Config(**facts['model']['config']))
    batch = {name[10:]: x for name, x in arrays.items() if name.startswith('padded/in/')}
    weights = batch.pop('decoder_loss_weights')
    boxes = jax.eval_shape(lambda: net.init(jax.random.key(0), **batch, deterministic=True))
    stored = read_arrays(t5x_reference.checkpoint('t5_1_1-orbax-0'))
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: stored[f'target/{path_str(path)}'].read(), unbox(boxes['params'])
    )

    def loss(params):
        logits = net.apply({'params': params}, **batch, deterministic=True)
        log_z = jax.nn.logsumexp(logits, -1)
        targets = batch['decoder_target_tokens'][..., None]
        cross_entropy = log_z - jax.numpy.take_along_axis(logits, targets, -1)[..., 0]
        return (weights * (cross_entropy + 1e-4 * log_z**2)).sum() / weights.sum()

    return params, boxes, jax.jit(jax.value_and_grad(loss))


# test_t5x_resuming.py trains the run 'default'.
RUNS = [name for name in t5x_reference.facts('t5_1_1')['train'] if name != 'default']


@pytest.mark.long
@pytest.mark.parametrize('name', RUNS)
def test_ten_steps_equal_those_of_t5x(t5x_model, name):
    params, boxes, loss_and_gradients = t5x_model
    run = t5x_reference.facts('t5_1_1')['train'][name]
    settings = run['adafactor'] | {'logical_factor_rules': standard_logical_factor_rules()}
    rate = run['learning_rate']
    tx = as_transformation(Adafactor(**settings).optimizer(lambda step: rate), boxes)
    update = jax.jit(tx.update)

    def train(params):
        """The loss before each step, and the arrays after the last one by their paths."""
        state, losses = tx.init(params), []
        for _ in range(10):
            loss, grads = loss_and_gradients(params)
            updates, state = update(grads, state, params)
            params = jax.tree.map(jax.numpy.add, params, updates)
            losses.append(loss)
        assert int(state.step) == 10
        trees = {'': params} | {f'/{name}': getattr(state, name) for name in state._fields[1:]}
        return losses, {
            path_str(path) + end: np.asarray(x)
            for end, tree in trees.items()
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    def summarize(params):
        losses, arrays = train(params)
        return losses, {path: np.square(x.astype(np.float64)).sum() for path, x in arrays.items()}

    (losses, squares), (loss_spreads, spreads) = (
        summarize(params),
        rounding_spread(summarize, params, draws=2),
    )
    for expected, loss, spread in zip(run['loss_before_step'], losses, loss_spreads, strict=True):
        assert_equal_but_for_rounding(loss, expected, spread, steps=10, operations=8)
    arrays, sums = train(params)[1], run['params_after'] | run['state_after']
    assert arrays.keys() == sums.keys()
    for path, (shape, dtype, _, expected) in sums.items():
        assert (list(arrays[path].shape), str(arrays[path].dtype)) == (shape, dtype), path
        # Squares double the relative error of their elements.
        assert_equal_but_for_rounding(
            squares[path], expected, spreads[path], steps=10, operations=16, name=path
        )


# T5X's other optimizers.

PARAMS = {'mlp': {'kernel': jnp.ones((3, 4)), 'bias': jnp.ones(4)}, 'norm': {'scale': jnp.ones(4)}}


def steps(tx, params, count=3):
    """The parameters after several updates, with the gradient sin(parameter) + 1."""
    state = tx.init(params)
    for _ in range(count):
        updates, state = tx.update(jax.tree.map(lambda x: jnp.sin(x) + 1, params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.filterwarnings('ignore:.*Traversal:DeprecationWarning')
def test_each_part_has_its_own_optimizer_and_the_rest_stays():
    kernels = ModelParamTraversal(lambda path, x: path.endswith('/kernel') and x.ndim == 2)
    several = MultiOptimizer([(kernels, adamw(0.1, weight_decay=0.5)), ('bias', sgd(0.2))])
    found = steps(as_transformation(with_learning_rate(several, lambda step: 9.0)), PARAMS)
    by_hand = {
        'mlp': {
            'kernel': steps(optax.adamw(0.1, weight_decay=0.5), PARAMS['mlp']['kernel']),
            'bias': steps(optax.sgd(0.2), PARAMS['mlp']['bias']),
        },
        'norm': PARAMS['norm'],
    }
    assert_close(found, by_hand)
    assert not np.allclose(found['mlp']['kernel'], found['mlp']['bias'])


def test_adafactor_in_a_part_knows_the_names_and_has_the_rate_of_the_trainer():
    axes = ('embed', 'layers', 'mlp')
    params = {'a': nn.LogicallyPartitioned(jnp.ones((4, 2, 3)), axes), 'b': jnp.ones(3)}
    adafactor = Adafactor(logical_factor_rules=standard_logical_factor_rules())
    several = MultiOptimizer([('^a', adafactor), ('^b', lion(0.1))])

    def rate(step):
        return 0.1 / (step + 1)

    found = steps(as_transformation(several.optimizer(rate), params), unbox(params))
    alone = as_transformation(adafactor.optimizer(rate), {'a': params['a']})
    assert_close(found['a'], steps(alone, {'a': params['a'].value})['a'])
    assert_close(found['b'], steps(optax.lion(0.1), params['b']))


def test_a_wrapped_chain_in_a_gin_file_equals_optax(load):
    """As in T5X's files for GPUs: evaluated references in a list, each with its own settings."""
    load(
        'from __gin__ import dynamic_registration\n'
        'import optax\n'
        'from t5x import optimizers\n'
        'OPTIMIZER = @optimizers.chain()\n'
        'optimizers.chain.transformations = [@optax.clip(), @optimizers.adamw()]\n'
        'optax.clip.max_delta = 0.5\n'
        'optimizers.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()\n'
        'optax.warmup_cosine_decay_schedule:\n'
        '  init_value = 0.0\n  peak_value = 0.5\n  warmup_steps = 2\n  decay_steps = 10\n'
        'optax.constant_schedule.value = %OPTIMIZER\n'
    )
    tx = gin.get_bindings('optax.constant_schedule')['value']
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.5, 2, 10)
    by_hand = optax.chain(optax.clip(0.5), optax.adamw(rate))
    assert with_learning_rate(tx, lambda step: 9.0) is tx
    assert_close(steps(tx, PARAMS), steps(by_hand, PARAMS))


@pytest.mark.parametrize(
    'pairs, words',
    [
        ([('kernel', sgd(1.0)), ('mlp', sgd(1.0))], ['[0] and [1]', 'mlp/kernel']),
        ([('kernal', sgd(1.0))], ['[0][0] selects no parameter']),
        ([('kernel', optax.adamw)], ['[0][1] is @adamw', 'with the parentheses']),
        ([(3, sgd(1.0))], ['[0][0] is 3', 'ModelParamTraversal']),
        ([sgd(1.0).init], ['[0] is', 'write (traversal, optimizer)']),
    ],
)
def test_parts_that_do_not_fit_are_errors(pairs, words):
    with pytest.raises(ConfigError) as error:
        as_transformation(MultiOptimizer(pairs).optimizer(lambda step: 1.0)).init(PARAMS)
    assert all(word in str(error.value) for word in words)
