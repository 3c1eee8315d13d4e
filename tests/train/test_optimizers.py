"""Optimizers: the updates they make, the weights they decay, and how gin files combine them."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from small import model, partitioner

from partitioning import unbox
from train import NextToken, TrainConfig
from train.cli.command import explain
from train.data import CausalLM, TextFiles
from train.errors import ConfigError
from train.optimizers import (
    Optimizer,
    as_transformation,
    chain,
    decay_matrices_only,
    label_by_path,
    learning_rate_of,
    matrices_for_muon,
    share_of,
)
from train.running.run import prepare

pytestmark = pytest.mark.core


def update(tx, params, grads=None, steps=1):
    """The updates of the last of several steps with the same gradients, by default of zeros."""
    state, updates = tx.init(params), None
    for _ in range(steps):
        updates, state = tx.update(grads or jax.tree.map(jnp.zeros_like, params), state, params)
    return updates, state


# Weight decay.


def decayed(optimizer, params):
    """The paths of the parameters that an update with zero gradients changes."""
    plain = unbox(params)
    updates, _ = update(as_transformation(optimizer, params), plain)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    return {jax.tree_util.keystr(path, simple=True, separator='/') for path, x in leaves if x.any()}


def named(shape, *names):
    return nn.LogicallyPartitioned(jnp.ones(shape), names)


BOXED = {
    'embedding': named((4, 8), 'vocab', 'embed'),
    'final_norm': {'gain': named((8,), 'embed')},
    'blocks': {
        'norm': {'scale': named((3, 8), 'layers', 'embed')},
        'up': {
            'bias': named((3, 6), 'layers', 'mlp'),
            'scale': named((3, 8, 6), 'layers', 'a', 'b'),
        },
    },
    'temperature': named(()),
}
MATRICES = {'embedding', 'blocks/up/scale'}


@pytest.mark.parametrize(
    'make',
    [
        lambda mask: Optimizer(
            transform=lambda learning_rate: optax.adamw(learning_rate, mask=mask), learning_rate=0.1
        ),
        lambda mask: optax.adamw(0.1, mask=mask),
        lambda mask: chain([optax.clip(1.0), optax.lion(0.1, mask=mask)]),
        lambda mask: optax.multi_transform(
            {'all': optax.adamw(0.1, mask=mask)}, label_by_path([('', 'all')])
        ),
        lambda mask: optax.masked(optax.chain(optax.adam(0.1), optax.add_decayed_weights(1)), mask),
    ],
    ids=['Optimizer', 'adamw', 'chain', 'multi_transform', 'masked'],
)
def test_only_matrices_decay_whatever_their_names_and_however_layers_are_stacked(make):
    assert decayed(make(decay_matrices_only), BOXED) == MATRICES


def test_variables_of_nnx_decay_alike():
    with nnx.use_eager_sharding(False):
        params = nnx.State(
            {
                'norm': nnx.Param(jnp.ones((3, 8)), out_sharding=('layers', 'embed')),
                'kernel': nnx.Param(jnp.ones((3, 8, 6)), out_sharding=('layers', 'embed', 'mlp')),
                'bias': nnx.Param(jnp.ones(8)),
            }
        )
        tx = as_transformation(optax.adamw(0.1, mask=decay_matrices_only), params)
        updates, _ = update(tx, params)
    changed = {name: bool(updates[name].get_value().any()) for name in params}
    assert changed == {'norm': False, 'kernel': True, 'bias': False}


def test_without_names_the_rank_decides():
    params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    assert decayed(optax.adamw(0.1, mask=decay_matrices_only), params) == {'w'}


def test_a_run_gives_the_names_of_its_parameters_to_the_optimizer(tmp_path, texts):
    masks = []

    def mask(params):
        masks.append(decay_matrices_only(params))
        return masks[-1]

    config = TrainConfig(
        model_dir=str(tmp_path / 'model'),
        objective=NextToken(model=model()),
        partitioner=partitioner(4, 2),
        optimizer=chain([optax.adamw(0.1, mask=mask)]),
        task=CausalLM(source=TextFiles(pattern='*', root=str(texts), holdout_percent=20.0)),
        total_steps=1,
        batch_size=8,
        sequence_length=16,
    )
    run = prepare(config)
    state = run.plan.abstract_state
    jax.eval_shape(run.tx.update, state.params, state.opt_state, state.params)
    for found in (masks[0], masks[-1]):  # of init and of an update
        assert found['layers']['attention_norm']['scale'] is False
        assert found['layers']['mlp']['up'] is True
        assert found['embedding'] is True


# Learning rates.


def test_the_learning_rate_of_a_report_is_that_of_the_update():
    rate = optax.linear_schedule(0.0, 1.0, 10)
    params = {'w': jnp.ones(2)}
    injected = optax.chain(optax.clip(9.0), optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
    for optimizer in (Optimizer(transform=optax.sgd, learning_rate=rate, clip_norm=None), injected):
        grads = {'w': jnp.ones(2)}
        updates, state = update(as_transformation(optimizer), params, grads, steps=4)
        assert float(learning_rate_of(optimizer, state, 3)) == pytest.approx(0.3)
        np.testing.assert_allclose(updates['w'], -0.3, rtol=1e-6)


def test_a_learning_rate_that_cannot_be_read_is_not_reported():
    params = {'learning_rate': jnp.ones(2)}  # a parameter with this name
    one = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    for tx in (optax.sgd(0.1), optax.adam(0.1), optax.chain(one, one)):
        assert learning_rate_of(tx, as_transformation(tx).init(params), 0) is None
    constant = Optimizer(transform=optax.sgd, learning_rate=0.5)
    assert float(learning_rate_of(constant, (), 7)) == 0.5


# Combinations.


def test_labels_choose_the_optimizer_of_each_parameter():
    params = {'embedding': jnp.ones(2), 'layers': {'scale': jnp.ones(2), 'up': jnp.ones((2, 2))}}
    rules = [('^embedding', 'a'), ('scale$', 'b'), ('.*', 'c')]
    transforms = {name: optax.sgd(rate) for name, rate in (('a', 1.0), ('b', 2.0), ('c', 3.0))}
    tx = optax.multi_transform(transforms, label_by_path(rules))
    updates, _ = update(as_transformation(tx), params, jax.tree.map(jnp.ones_like, params))
    found = {x: float(u.max()) for x, u in (updates | updates['layers']).items() if x != 'layers'}
    assert found == {'embedding': -1, 'scale': -2, 'up': -3}


def test_muon_takes_the_heads_of_every_stacked_layer_as_one_matrix():
    gradient = jax.random.normal(jax.random.key(0), (3, 8, 8))
    names = {
        'query': ('layers', 'embed', 'heads', 'kv'),
        'out': ('layers', 'heads', 'kv', 'embed'),
        'embedding': ('vocab', 'embed'),
        'scale': ('layers', 'embed'),
    }
    grads = {
        'query': gradient.reshape(3, 8, 2, 4),
        'out': gradient.reshape(3, 2, 4, 8),
        'embedding': gradient[0],
        'scale': gradient[0, :3],
    }
    params = {name: named(grad.shape, *names[name]) for name, grad in grads.items()}
    muon = optax.contrib.muon(0.5, muon_weight_dimension_numbers=matrices_for_muon)
    updates, _ = update(as_transformation(muon, params), unbox(params), grads, steps=2)
    layers = {f'layer_{i}': gradient[i] for i in range(3)}
    by_layer, _ = update(optax.contrib.muon(0.5), layers, layers, steps=2)
    for name in ('query', 'out'):
        for i in range(3):
            found, expected = updates[name][i].reshape(8, 8), by_layer[f'layer_{i}']
            np.testing.assert_allclose(found, expected, atol=1e-5)
    vectors = {name: grads[name] for name in ('embedding', 'scale')}
    by_adam, _ = update(optax.nadam(0.5), vectors, vectors, steps=2)
    for name, expected in by_adam.items():
        np.testing.assert_allclose(updates[name], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ('rules', 'message'),
    [
        ([('scale', 'a')], r"no rule matches 'w'.*\('\.\*', 'a'\)"),
        ([('.*', 'a'), ('scale', 'b')], r"\('scale', 'b'\) chooses no label"),
    ],
)
def test_labels_that_do_not_fit_are_errors(rules, message):
    with pytest.raises(ConfigError, match=message):
        label_by_path(rules)({'w': 0})


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (
            lambda: as_transformation(optax.adamw),
            r'optimizer is <function adamw.*@optax\.adamw\(\)',
        ),
        (lambda: chain([optax.clip(1.0), optax.adamw]), r'transformations\[1\] is <function adamw'),
        (lambda: Optimizer(transform=3, learning_rate=1.0), r'Optimizer\.transform is 3'),
        (
            lambda: Optimizer(transform=optax.zero_nans, learning_rate=1.0),
            r'Optimizer\.transform .* takes learning_rate.* in place of the Optimizer',
        ),
        (
            lambda: Optimizer(transform=optax.sgd, learning_rate=optax.linear_schedule),
            r'Optimizer\.learning_rate .*linear_schedule.* with parentheses',
        ),
        (lambda: Optimizer(transform=optax.sgd, learning_rate='a'), r"learning_rate is 'a'"),
        (
            lambda: Optimizer(transform=optax.sgd, learning_rate=1.0, clip_norm=0.0),
            r'clip_norm is 0\.0',
        ),
    ],
)
def test_malformed_optimizers_are_errors(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_infinite_norm_does_not_clip():
    grads = {'w': jnp.array([3e4, -4e4])}
    tx = Optimizer(transform=optax.sgd, learning_rate=1.0, clip_norm=float('inf')).build()
    updates, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_array_equal(updates['w'], -grads['w'])


def test_a_share_of_the_steps():
    assert [share_of(250, 0.08), share_of(100_000, 0.02), share_of(6, 0.08)] == [20, 2000, 0]


# gin files.


def optimizer_of(load, text):
    """The optimizer that a gin file describes."""
    load(f'TrainConfig.optimizer = %OPTIMIZER\n{text}')
    return gin.get_bindings('TrainConfig')['optimizer']


def test_gin_combines_transformations_and_chooses_them_by_path(load):
    optimizer = optimizer_of(
        load,
        """
OPTIMIZER = @chain()
chain.transformations = [@optax.clip_by_global_norm(), @optax.multi_transform()]
optax.clip_by_global_norm.max_norm = 1.0
optax.multi_transform:
  transforms = {'vectors': @vectors/optax.sgd(), 'matrices': @optax.contrib.muon()}
  param_labels = @label_by_path()
label_by_path.rules = [('scale$', 'vectors'), ('.*', 'matrices')]
vectors/optax.sgd.learning_rate = @optax.join_schedules()
optax.join_schedules.schedules = [@optax.linear_schedule(), @optax.constant_schedule()]
optax.join_schedules.boundaries = [10]
optax.linear_schedule:
  init_value = 0.0
  end_value = 1.0
  transition_steps = 10
optax.constant_schedule.value = 1.0
optax.contrib.muon.learning_rate = 0.5
""",
    )
    params = {'scale': jnp.ones(4), 'w': jnp.eye(4)}
    grads = jax.tree.map(lambda x: 10 * x, params)
    updates, _ = update(as_transformation(optimizer), params, grads, steps=3)
    by_hand = optax.contrib.muon(0.5)
    norm = np.sqrt(8 * 100)
    np.testing.assert_allclose(updates['scale'], -0.2 * 10 / norm, rtol=1e-5)
    expected, _ = update(by_hand, {'w': params['w']}, {'w': grads['w'] / norm}, steps=3)
    np.testing.assert_allclose(updates['w'], expected['w'], rtol=1e-5)


@pytest.mark.parametrize('name', ['muon', 'schedule_free_adamw', 'dadapt_adamw', 'cocob'])
def test_optimizers_of_optax_contrib_work_alone_and_in_the_optimizer(load, name):
    params = {'w': jnp.eye(4)}
    for text in (
        f'OPTIMIZER = @optax.contrib.{name}()\noptax.contrib.{name}.learning_rate = 0.01\n',
        f'OPTIMIZER = @Optimizer()\nOptimizer.transform = @optax.contrib.{name}\n'
        'Optimizer.learning_rate = 0.01\n',
    ):
        optimizer = optimizer_of(load, text)
        assert isinstance(optimizer, Optimizer | optax.GradientTransformation)
        updates, _ = update(as_transformation(optimizer), params, params)
        assert np.isfinite(updates['w']).all() and updates['w'].any()
        gin.clear_config()


def test_an_error_of_optax_is_one_line_that_names_the_schedule(load):
    load(
        'TrainConfig.optimizer = @optax.cosine_decay_schedule()\n'
        'optax.cosine_decay_schedule:\n  init_value = 1.0\n  decay_steps = -14\n'
    )
    with pytest.raises(ValueError) as error:
        gin.get_bindings('TrainConfig')
    line = explain(error.value)
    assert line.startswith('cosine_decay_schedule: ') and line.endswith('-14.')
    assert len(line.splitlines()) == 1
