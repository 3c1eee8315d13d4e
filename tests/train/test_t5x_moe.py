"""T5X's mixtures of experts: its trainer, models and network."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_reference
from small import batch

from partitioning import MoePjitPartitioner, TrainState
from partitioning.state import path_str
from train.checkpoints import find_checkpoint, open_restored
from train.data import ByteTokenizer
from train.errors import ConfigError
from train.models.experts import ExpertsConfig
from train.models.t5 import T5Config
from train.objectives.objective import divide
from train.optimizers import Optimizer, as_transformation
from train.running.steps import make_train_step
from train.t5x import adafactor, network
from train.t5x.adafactor import logical_factor_rules
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.checkpoints import UpcycleCheckpointer
from train.t5x.models import MoeDecoderOnlyModel, MoeEncoderDecoderModel
from train.t5x.trainer import MoeTrainer, Trainer

pytestmark = pytest.mark.core

BYTES = ByteTokenizer()


class Model:
    """A model of T5X that has only an optimizer."""

    def __init__(self, clip_norm):
        self.clip_norm = clip_norm

    def optimizer(self, rate):
        if self.clip_norm == 'plain':
            return optax.sgd(rate)
        return Optimizer(transform=optax.sgd, learning_rate=rate, clip_norm=self.clip_norm)


PARAMS = {'mlp': {'expert': {'wi': np.float32(1.0)}, 'router': np.float32(1.0)}}


@pytest.mark.parametrize(
    'clip_norm, settings, updates',
    [
        (None, {}, (-12.0, -4.0)),
        ('plain', {}, (-12.0, -4.0)),
        (1.0, {}, (-0.6, -0.8)),  # (6, 8), clipped after the multiplication
        (None, {'num_expert_partitions': 1}, (-1.5, -4.0)),
        (None, {'sharded_match_fn': None}, (-1.5, -4.0)),
        (None, {'sharded_match_fn': lambda path: path == 'mlp/router'}, (-1.5, -32.0)),
    ],
)
def test_the_gradients_of_experts_are_multiplied(clip_norm, settings, updates):
    rate = (lambda step: 0.5) if clip_norm != 1.0 else (lambda step: 1.0)
    trainer = MoeTrainer(**{'learning_rate_fn': rate, 'num_expert_partitions': 8} | settings)
    tx = as_transformation(trainer.optimizer(Model(clip_norm)), PARAMS)
    grads = {'mlp': {'expert': {'wi': jnp.float32(3.0)}, 'router': jnp.float32(8.0)}}
    if clip_norm == 1.0:
        grads['mlp']['expert']['wi'] = jnp.float32(0.75)
    changed, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    found = (changed['mlp']['expert']['wi'], changed['mlp']['router'])
    np.testing.assert_allclose(found, updates, rtol=1e-6)


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'num_expert_partitions': 0}, 'MoeTrainer.num_expert_partitions is 0: it must be an int'),
        ({'sharded_match_fn': '.*'}, r"sharded_match_fn is '\.\*': it must be a function"),
    ],
)
def test_settings_of_the_trainer(settings, message):
    with pytest.raises(ConfigError, match=message):
        MoeTrainer(**{'learning_rate_fn': lambda step: 1.0, 'num_expert_partitions': 2} | settings)


def test_a_network_without_experts():
    settings = {'learning_rate_fn': lambda step: 1.0, 'num_expert_partitions': 2}
    grads, model = {'mlp': {'wi': jnp.ones(2)}}, Model(None)
    tx = MoeTrainer(**settings, sharded_match_fn=lambda path: False).optimizer(model).build()
    with pytest.raises(ConfigError, match="selects none of the 1 parameters, such as 'mlp/wi'"):
        tx.update(grads, tx.init(PARAMS), PARAMS)
    # As in T5X, the default function of the trainer need not select any.
    tx, plain = (
        t.optimizer(model).build()
        for t in (MoeTrainer(**settings), Trainer(learning_rate_fn=lambda step: 1.0))
    )
    got, expected = (t.update(grads, t.init(grads), grads)[0] for t in (tx, plain))
    np.testing.assert_array_equal(got['mlp']['wi'], expected['mlp']['wi'])


# Models.

EXPERTS = ExpertsConfig(num_experts=4, num_selected_experts=2)
SIZES = {
    'vocab_size': 264,
    'emb_dim': 16,
    'num_heads': 2,
    'head_dim': 8,
    'mlp_dim': 32,
    'mlp_activations': ('gelu', 'linear'),
    'dropout_rate': 0.1,
}
LAYERS = {'num_encoder_layers': 1, 'num_decoder_layers': 1}


def encoder_decoder(experts=EXPERTS, **settings):
    config = network.T5Config(**SIZES, **LAYERS, experts=experts)
    given = {'input_vocabulary': BYTES, 'output_vocabulary': BYTES, 'optimizer_def': optax.sgd(0.1)}
    return MoeEncoderDecoderModel(network.Transformer(config), **given | settings)


def decoder_only(**settings):
    config = network.TransformerConfig(**SIZES, num_layers=2, experts=EXPERTS)
    module = network.DecoderWrapper(config)
    optimizer = optax.adam(0.01)
    return MoeDecoderOnlyModel(module, vocabulary=BYTES, optimizer_def=optimizer, **settings)


def pairs(rows=8):
    """Rows of inputs with padding, and targets; the last row is padding."""
    found = batch(0, rows, 12)
    inputs = np.array(found['decoder_input_tokens']) + 1
    inputs[1, 4:] = 0
    found['decoder_target_tokens'] = found['decoder_target_tokens'] + 1
    for array in (inputs, *found.values()):
        array[-1] = 0
    return {'encoder_input_tokens': inputs, **found}


def gradients(objective, rng):
    """A function (params, batch) -> (gradients, (total, sums))."""

    def loss(params, batch):
        total, sums, _ = objective.loss(params, batch, rng, {})
        return total, (total, sums)

    return jax.grad(loss, has_aux=True)


@pytest.mark.long
def test_an_encoder_decoder_on_a_mesh():
    """The loss of data 2 x expert 4 equals one device's, with dropout and dropped tokens."""
    factors = {'aux_loss_factor': 0.5, 'router_z_loss_factor': 0.25}
    model, rows = encoder_decoder(loss_normalizing_factor=40, **factors), pairs()
    objective = model.objective()
    partitioner = MoePjitPartitioner(num_expert_partitions=4, num_partitions=1)
    assert dict(partitioner.mesh.shape) == {'data': 2, 'expert': 4, 'model': 1}
    plan = partitioner.plan(lambda key: objective.init(key, rows)['params'], jax.random.key(0))
    params, spec = plan.init(jax.random.key(0)), partitioner.data_partition_spec
    for stack in ('encoder', 'decoder'):
        names = {'wi_0': (4, 16, 32), 'wi_1': (4, 16, 32), 'wo': (4, 32, 16)}
        for name, shape in names.items():
            kernel = params[stack]['layers_0']['mlp']['expert'][name]['kernel']
            assert kernel.shape == shape and kernel.sharding.shard_shape(shape) == (1, *shape[1:])
        router = params[stack]['layers_0']['mlp']['router']['router_weights']['w']['kernel']
        assert router.shape == (16, 4)
    step = gradients(objective, jax.random.key(1))
    program = partitioner.partition(step, (plan.specs, spec), (plan.specs, None))
    compiled = program.lower(params, rows).compile()
    found = jax.device_get(compiled(params, rows))
    one = jax.device_put(jax.device_get(params), jax.devices()[0])
    expected = jax.device_get(jax.jit(step)(one, rows))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, found, expected)
    _, (total, sums) = found
    assert sums['experts/dropped_tokens'] > 0
    # T5X divides the cross-entropy by the number, and adds the losses of the experts.
    names = ('auxiliary_loss', 'router_z_loss')
    losses = [sums[f'experts/{name}'] / sums['weight'] for name in names]
    assert losses[0] > 1.9 and losses[1] > 0
    expected = sums['loss'] / 40 + 0.5 * losses[0] + 0.25 * losses[1]
    np.testing.assert_allclose(total / 40, expected, rtol=1e-5)
    text = compiled.as_text()
    # There and back, forward and backward, in both layers.
    assert len(re.findall(r' all-to-all(?:-start)?\(', text)) == 8
    assert 'all-gather(' not in text


@pytest.mark.long
def test_decoding_step_by_step():
    """Cached steps give the logits of whole rows, if experts take all tokens of these."""
    whole = encoder_decoder(dataclasses.replace(EXPERTS, dropless=True)).module
    limited, rows = encoder_decoder().module, pairs()  # which would drop tokens of whole rows
    inputs, given = rows['encoder_input_tokens'], rows['decoder_input_tokens'][:, :5]

    def init(key):
        return whole.init(key, inputs, given, given, deterministic=True)['params']

    shapes, rng = nn.unbox(jax.eval_shape(init, jax.random.key(0))), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), shapes)

    def compare(params):
        expected = whole.apply({'params': params}, inputs, given, given * 0 + 1, deterministic=True)
        encoded = whole.apply({'params': params}, inputs, deterministic=True, method='encode')

        def decode(variables, tokens):
            return limited.apply(
                {'params': params, **variables},
                *(encoded, inputs, tokens, tokens),
                deterministic=True,
                decode=True,
                max_decode_length=5,
                method='decode',
                mutable=['cache'],
            )

        def step(cache, tokens):
            logits, changed = decode({'cache': cache}, tokens[:, None])
            return changed['cache'], logits[:, 0]

        _, found = jax.lax.scan(step, decode({}, given)[1]['cache'], given.T)
        return found.swapaxes(0, 1), expected

    partitioner = MoePjitPartitioner(num_expert_partitions=4, num_partitions=1)
    found, expected = partitioner.partition(compare, None, None)(params)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_decoder_trains():
    trainer = MoeTrainer(learning_rate_fn=lambda step: 0.01, num_expert_partitions=4)
    model = decoder_only(aux_loss_factor=0.01)
    objective, tx = model.objective(), as_transformation(trainer.optimizer(model))
    partitioner = MoePjitPartitioner(num_expert_partitions=4, num_partitions=1)

    def init(key):
        return TrainState.create(objective.init(key, batch(0)), tx)

    plan, spec = partitioner.plan(init, jax.random.key(0)), partitioner.data_partition_spec
    state = plan.init(jax.random.key(0))
    key = jax.random.key(1)
    step = make_train_step(objective, tx, key=key, num_microbatches=1, data_spec=spec)
    program = partitioner.partition(step, (plan.specs, spec), (plan.specs, None), donate_argnums=0)
    losses = []
    for i in range(20):
        state, metrics = program(state, batch(i % 4))
        losses.append(divide(metrics['loss']))
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert divide(metrics['experts/expert_usage']) > 0


@pytest.mark.long
def test_an_upcycled_checkpoint_of_t5x():
    """Copies of a dense MLP, with weights whose sum is 1, give the logits of T5X's dense model."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Four(UpcycleCheckpointer):
        num_experts: int = 4

    experts = ExpertsConfig(
        num_experts=4, num_selected_experts=2, normalize_weights=True, dropless=True
    )
    module, batch = t5x_reference.net('t5_1_1', experts=experts), t5x_reference.batch('t5_1_1')
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    rows = [batch[name] for name in names]
    partitioner = MoePjitPartitioner(num_expert_partitions=2, num_partitions=2)

    def init(key):
        variables = module.init(key, *rows, deterministic=True)
        tx = adafactor.Adafactor(logical_factor_rules=logical_factor_rules()).optimizer(
            lambda step: 1.0
        )
        params = variables['params']
        return TrainState.create({'params': params}, as_transformation(tx, params))

    plan = partitioner.plan(init, jax.random.key(0))
    shapes = {path_str(p): x for p, x in jax.tree_util.tree_leaves_with_path(plan.abstract_state)}

    def initialize(paths):
        parameters = [path for path in paths if path.startswith('params/')]
        assert len(parameters) == 4 and all('/mlp/router/' in path for path in parameters)
        return {p: jax.device_put(np.ones(shapes[p].shape), shapes[p].sharding) for p in paths}

    [config] = RestoreCheckpointConfig(
        path=str(t5x_reference.checkpoint('t5_1_1-orbax-10')),
        mode='specific',
        fallback_to_scratch=True,
        strict=False,
        checkpointer_cls=Four,
        assignment_map=[
            (r'target(.*)mlp\/expert(.*)', r'target\1mlp\2'),
            (r'.*\/router\/.*', None),
            (r'state\/param_states.*', None),
        ],
    ).each()
    folder, step = find_checkpoint(config)
    state = open_restored(config, folder).restore(step, plan.abstract_state, initialize)
    dense = t5x_reference.params('t5_1_1-orbax-10')['encoder']['layers_0']['mlp']
    experts_of_layer = state.params['encoder']['layers_0']['mlp']['expert']
    for name in ('wi_0', 'wi_1', 'wo'):
        copies = np.asarray(experts_of_layer[name]['kernel'])
        np.testing.assert_array_equal(copies, np.stack([dense[name]['kernel']] * 4))
    apply = functools.partial(module.apply, deterministic=True)
    program = partitioner.partition(
        lambda p: apply({'params': p}, *rows), (plan.specs.params,), None
    )
    real = rows[2] > 0  # experts do not take padding, and T5X's MLP does
    logits = np.asarray(program(state.params))
    expected = t5x_reference.arrays('t5_1_1')['padded/step10/logits']
    np.testing.assert_allclose(logits[real], expected[real], atol=1e-5)


@pytest.mark.parametrize(
    'experts, settings, message',
    [
        (None, {}, r'module has no experts: write experts = @experts.ExpertsConfig\(\)'),
        (EXPERTS, {'aux_loss_factor': -1.0}, r'MoeEncoderDecoderModel.aux_loss_factor is -1.0: '),
    ],
)
def test_settings_of_models(experts, settings, message):
    with pytest.raises(ConfigError, match=message):
        encoder_decoder(experts, **settings)


def test_layers_with_experts():
    """Layers 1 and 3 of the encoder and 2 of the decoder: the losses are means over all three."""
    experts = dataclasses.replace(EXPERTS, encoder_every=2, decoder_every=3)
    config = T5Config(**SIZES, num_encoder_layers=4, num_decoder_layers=3, experts=experts)
    chosen = {'encoder': range(4), 'decoder': range(3)}
    found = {s: [config.of_layer(s, i).experts for i in layers] for s, layers in chosen.items()}
    assert [e is not None for e in found['encoder']] == [False, True, False, True]
    assert [e is not None for e in found['decoder']] == [False, False, True]
    assert found['decoder'][2].auxiliary_loss_factor == pytest.approx(0.01 / 3)
    with pytest.raises(ConfigError, match='encoder_every is 2 and decoder_every is 3, but scanned'):
        dataclasses.replace(config, scan_layers=True, scalable=True)
