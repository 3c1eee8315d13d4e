"""What the backward pass keeps of a layer: by name, on the host, layer by layer; and unrolling."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gin_fixtures import load_config
from small import Steps, model, small_config

from partitioning.hardware.drawn import drawing_devices
from partitioning.products.flops import count_jaxpr_flops
from partitioning.state.boxes import unbox
from train import NextToken
from train.attention import AttentionSettings
from train.gin.load import find_config
from train.models.parameters import list_parameters
from train.models.remat import NAMES, Remat
from train.models.t5.config import T5Config
from train.models.t5.encoder_decoder import T5
from train.models.transformer import Transformer
from train.planning.forecasts import plan_step

pytestmark = pytest.mark.core

_PROJECTIONS = 'attended', 'query', 'key', 'value', 'attention_out'


_EXPERTS = (
    'TransformerConfig.experts = @ExpertsConfig()',
    'ExpertsConfig.dropless = True',
    'ExpertsConfig.num_experts = 4',
    'ExpertsConfig.num_selected_experts = 2',
)


@pytest.mark.parametrize(
    'batch, changes, kept',
    [
        (32, (), ('dots', 'attended')),
        (128, (), _PROJECTIONS),
        (256, (), ('attended',)),
        (1024, (), ()),
        (16, _EXPERTS, ('dots', 'attended')),
        (32, _EXPERTS, _PROJECTIONS),
    ],
)
def test_auto_keeps_what_fits_into_the_memory_of_the_chip(batch, changes, kept):
    """1B on 16 chips of v5e, with 12.7 of 16.9 GB to use, in GB per device.

    The state and gradients take 1.3, the parameters of a layer and of the output layer 0.5, and the
    logits 0.8. Each row of 2,048 tokens keeps 0.13 for the inputs of all layers, and 0.13 for the
    results of attention, 0.34 for the projections of attention and 1.07 for hidden layers, where
    these are kept; and takes 0.37 for one layer at work. A device has 2, 8, 16 or 64 rows.

    Four experts, two per token, have 2.4 B more parameters: 2.7 more for state and gradients, 0.6
    for a layer. Their hidden layers and results keep 2.41 per row.
    """
    files = [f'configs/{n}.gin' for n in ('runs/pretrain', 'models/1b', 'partitioning/fsdp')]
    bindings = ["TOPOLOGY = 'v5e:4x4'", f'BATCH_SIZE = {batch}', "TransformerConfig.remat = 'auto'"]
    bindings += changes
    with drawing_devices():
        load_config([*files, 'configs/runs/forecast.gin'], bindings)
        run = plan_step(find_config()).run
    assert run.config.objective.model.config.remat.save == kept
    assert run.remat.startswith('remat auto keeps ' + (', '.join(kept) or 'only the inputs'))


def test_auto_recomputes_everything_where_the_memory_is_not_known(tmp_path):
    net = model(remat='auto')
    config = small_config(tmp_path, tmp_path, objective=NextToken(model=net))
    run = plan_step(config).run
    assert run.config.objective.model.config.remat == Remat()
    assert run.remat == (
        'remat auto keeps only the inputs of layers: the memory of cpu devices is not known'
    )


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'save': ['atended']},
            r"Remat.save has 'atended'\. Did you mean 'attended'\? Use names of .*'mlp_out'",
        ),
        ({'save': 'attended'}, "Remat.save is 'attended': use a list of 'dots', 'residual'"),
        ({'offload': ['dots']}, r"Remat.offload has 'dots'\. Use names of 'residual'"),
        ({'save': ['key', 'key']}, "has 'key' twice"),
        ({'save': ['key'], 'offload': ['key']}, "both have 'key'"),
    ],
)
def test_impossible_names_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        Remat(**changes)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'remat': ['full', 'some']}, "remat is .*'some'.*use 'none', 'dots', 'full', .*a Remat"),
        ({'remat': ['full', 'auto']}, "remat = 'auto', which chooses for all layers"),
        ({'remat': {'full': 1}}, "remat is {'full': 1}: use 'none'"),
        ({'remat': Remat(save=['mlp_gate']), 'gated_mlp': False}, "'mlp_gate', but gated_mlp"),
        ({'scan_unroll': 3}, r'scan_unroll is 3: it must divide num_layers \(2\)'),
        ({'scan_unroll': 1, 'remat': ['full', 'none']}, 'multiple of the 2 entries of remat'),
        ({'scan_unroll': 2, 'scan_layers': False}, 'scan_unroll is 2, but scan_layers is False'),
    ],
)
def test_impossible_settings_of_a_model_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'remat_policy': Remat(save=['mlp_gate'])}, "'mlp_gate', but mlp_activations has one"),
        ({'remat_policy': ['full', 'none'], 'scan_layers': True, 'scalable': True}, '2 entries'),
    ],
)
def test_impossible_settings_of_t5_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        T5Config(vocab_size=8, **changes)


def kept(capsys, loss, params):
    """What jax keeps for the backward pass: the names on the device, and the shapes on the host.

    An array that a kernel names inside has the name of the kernel.
    """
    jax.ad_checkpoint.print_saved_residuals(loss, params)
    printed = capsys.readouterr().out
    found = re.findall("named '(.+)'|jitted function '(_splash_attention)'", printed)
    return sorted(map(''.join, found)), re.findall(r'<.*host>\[(.+)\]', printed)


def test_a_layer_keeps_exactly_the_arrays_with_the_names(capsys):
    tokens, config = jnp.zeros((2, 128), int), model(post_norms=True, scan_layers=False).config
    params = {'params': jax.tree.map(lambda p: jnp.ones(p.shape), list_parameters(config))}

    def names(*remat, **changes):
        net = Transformer(dataclasses.replace(config, remat=remat, **changes))
        return kept(capsys, lambda p: net.apply(p, tokens).sum(), params)

    assert names(Remat(save=NAMES)) == (sorted(2 * NAMES), [])
    assert names('full', Remat(save=['attended'])) == (['attended'], []), 'the second layer'
    assert names('full') == ([], [])
    splash = {'attention': AttentionSettings(kind='splash')}
    kernels = ['_splash_attention'] * 4  # the sums of the weights are kept as well
    assert names(Remat(save=['attended', 'mlp_out']), **splash) == (kernels + ['mlp_out'] * 2, [])
    assert names('full', **splash) == ([], [])
    blockwise = {'attention': AttentionSettings(kind='blockwise')}
    assert names(Remat(save=['attended']), **blockwise) == (['attended'] * 4, [])
    assert names(Remat(save=['key'], offload=['query'])) == (['key'] * 2, ['2,128,8,8'] * 2)


def test_a_loop_keeps_no_weights_and_nothing_that_is_computed_element_by_element():
    net, tokens = model(num_layers=3), jnp.zeros((2, 16), int)
    params = {'params': jax.tree.map(lambda p: jnp.ones(p.shape), list_parameters(net.config))}
    grad = jax.grad(lambda p: net.apply(p, tokens).sum())
    traced = jax.make_jaxpr(grad)(params)
    forward = next(e for e in traced.eqns if e.primitive.name == 'scan')
    kept = [tuple(n for n in v.aval.shape if n > 1) for v in forward.outvars]
    assert kept.count((3, 2, 16, 96)) == 2, 'the halves of hidden layers'
    assert kept.count((3, 2, 8, 16, 16)) == 1, 'the exponentials of scores'
    assert not {(3, 64, 96), (3, 96, 64), (3, 64, 8, 8), (3, 8, 8, 64)} & {*kept}


def test_the_layers_of_t5_keep_exactly_the_arrays_with_the_names(capsys):
    tokens = jnp.ones((1, 4), jnp.int32)
    sizes = {'vocab_size': 8, 'emb_dim': 4, 'num_heads': 2, 'head_dim': 2, 'mlp_dim': 4}
    sizes |= {'num_encoder_layers': 1, 'num_decoder_layers': 1, 'dropout_rate': 0.0}
    sizes |= {'mlp_activations': ('gelu', 'linear')}

    def names(remat):
        net = T5(T5Config(**sizes, remat_policy=remat))
        params = jax.eval_shape(net.init, jax.random.key(0), tokens, tokens, tokens)
        params = jax.tree.map(lambda x: jnp.ones(x.shape), unbox(params))
        return kept(capsys, lambda p: net.apply(p, tokens, tokens, tokens).sum(), params)

    # The decoder attends to itself and to the encoder.
    expected = sorted(['attended'] * 3 + ['mlp_gate', 'mlp_up'] * 2)
    assert names(Remat(save=['attended', 'mlp_gate', 'mlp_up'])) == (expected, [])
    assert names('full') == ([], [])


KEPT = Remat(save=['attended', 'dots'], offload=['residual', 'mlp_up'])
BLOCK = [Remat(save=['attention_out'], offload=['residual']), 'full']


@pytest.mark.long
@pytest.mark.parametrize(
    'data, model_axis, changes, microbatches',
    [(4, 2, {'remat': KEPT, 'scan_unroll': 2}, 1), (2, 4, {'remat': BLOCK}, 2)],
    ids=['kept', 'blocks'],
)
def test_losses_do_not_depend_on_what_is_kept(four_layers, data, model_axis, changes, microbatches):
    net = model(num_layers=4, **changes)
    run = Steps(data, model_axis, net=net, microbatches=microbatches)
    np.testing.assert_allclose(run.losses(3), four_layers, rtol=1e-5)


@pytest.fixture(scope='module')
def four_layers():
    return Steps(1, 1, net=model(num_layers=4)).losses(3)


FULLY_SHARDED = [
    ('batch', ('data', 'model')),
    ('embed', ('data', 'model')),
    *((name, None) for name in ('vocab', 'heads', 'kv_heads', 'mlp', 'kv', 'length', 'layers')),
]


@pytest.mark.long
def test_kept_products_are_not_computed_again_where_their_gradients_are_scattered():
    """Full recomputation has one more product per weight matrix of a layer, 'dots' none of them.

    Counted by hand: per layer and token, 4 projections of 64 x 64 and the first 2 of the 3 products
    of 64 x 96 in the MLP, because the backward pass does not need the result of the last one.
    Attention has 2 products of 16 x 64, which both may compute again.
    """
    flops = {}
    for remat in ('dots', 'full'):
        run = Steps(
            4, 2, net=model(remat=remat), partitioning={'logical_axis_rules': FULLY_SHARDED}
        )
        flops[remat] = count_jaxpr_flops(run.step.trace(run.state, run.batch(0)).jaxpr)
    tokens, layers = 8 * 16, 2
    products = 2 * (4 * 64 * 64 + 2 * 64 * 96) * tokens * layers
    attention = 2 * (2 * 16 * 64) * tokens * layers
    assert products <= flops['full'] - flops['dots'] <= products + attention
