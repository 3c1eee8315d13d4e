"""Decoded tokens and their scores equal T5X's."""

import functools
import types

import jax
import numpy as np
import pytest
import t5x_reference
from small import partitioner

from partitioning import MoePjitPartitioner, standard_logical_axis_rules, unbox
from train.decoding import beam_search, predict, sample, start_decoder_only, start_encoder_decoder
from train.errors import ConfigError
from train.models.experts import ExpertsConfig
from train.models.t5 import T5, T5Config
from train.objectives import EncoderDecoder

pytestmark = pytest.mark.core
KEY = jax.random.PRNGKey(3)
KINDS = {
    'greedy_unscaled_scores': (
        functools.partial(sample, temperature=0, rescale_log_probs=False),
        1,
    ),
    'greedy_prompted': (functools.partial(sample, temperature=0.0), 1),
    'greedy_eos2': (functools.partial(sample, temperature=0.0), 1),
    'beam4': (beam_search, 4),
    'beam4_eos2': (beam_search, 4),
    'sample_t0.7_topk10_key3': (functools.partial(sample, temperature=0.7, top_k=10), 2),
    'sample_t1_topp0.9_key3': (functools.partial(sample, top_p=0.9), 2),
}


def objective(name):
    """What predict needs of an objective."""
    start = start_decoder_only if name == 'decoder_only' else start_encoder_decoder
    model = t5x_reference.net(name)
    return types.SimpleNamespace(start_decoding=functools.partial(start, model), model=model)


def restored(name):
    return t5x_reference.params(f'{name}-orbax-10')


def batch_of(name, kind):
    batch = t5x_reference.batch(name)
    if kind == 'greedy_prompted':
        batch['decoder_input_tokens'] = t5x_reference.arrays(name)[
            'decode/prompt_decoder_input_tokens'
        ]
    return batch


def predictor(name, kind):
    """The function (params, batch) -> all decodes of a kind."""
    search, num_decodes = KINDS[kind]
    eos2 = t5x_reference.facts(name)['decoding']['step10/eos2']
    return lambda params, batch: predict(
        objective(name),
        params,
        batch,
        KEY,
        decode_fn=search,
        num_decodes=num_decodes,
        return_all_decodes=True,
        prompt_with_targets=kind == 'greedy_prompted',
        end_token=eos2 if kind.endswith('_eos2') else 1,
    )


def check(found, expected, kind, step=10):
    np.testing.assert_array_equal(found.tokens, expected[f'decode/step{step}/{kind}/tokens'])
    scores = expected.get(f'decode/step{step}/{kind}/scores')
    if scores is not None:
        np.testing.assert_allclose(found.scores, scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    'name, kind',
    [
        ('t5_1_1', 'greedy_prompted'),
        ('t5_1_1', 'sample_t0.7_topk10_key3'),
        ('decoder_only', 'greedy_unscaled_scores'),
        ('decoder_only', 'sample_t1_topp0.9_key3'),
    ],
)
def test_decodes_equal_those_of_t5x(name, kind):
    found = jax.jit(predictor(name, kind))(restored(name), batch_of(name, kind))
    check(found, t5x_reference.arrays(name), kind)


@pytest.mark.long
def test_rows_that_reach_their_end_first_go_on_as_in_t5x():
    model = objective('decoder_only').model
    batch = batch_of('decoder_only', 'beam4')
    ones = np.ones_like(batch['decoder_input_tokens'])
    seed = t5x_reference.facts('decoder_only')['model']['init_prng_seed']
    init = jax.jit(functools.partial(model.init, deterministic=True))
    params = unbox(init(jax.random.PRNGKey(seed), ones, ones))['params']
    with np.load(t5x_reference.DATA / 'decoder_only_step0.npz') as expected:
        check(
            jax.jit(predictor('decoder_only', 'beam4'))(params, batch), dict(expected), 'beam4', 0
        )


def test_caches_are_sharded_over_rows_and_heads():
    kind = 'beam4'
    pjit = partitioner(2, 4, logical_axis_rules=standard_logical_axis_rules())
    rows, batch = pjit.data_partition_spec, batch_of('t5_1_1', kind)
    model, params = objective('t5_1_1').model, restored('t5_1_1')
    specs = pjit.plan(lambda key: model.init(key, **arguments(batch)), KEY).specs['params']
    run = pjit.partition(predictor('t5_1_1', kind), (specs, rows), None)
    text = run.lower_and_compile(params, batch).as_text()
    check(run(params, batch), t5x_reference.arrays('t5_1_1'), kind)
    # [rows, heads, head_dim, length] of one device, of 4 rows and 4 heads.
    num_decodes = KINDS[kind][1]
    assert f'f32[{2 * num_decodes},1,8,14]' in text
    assert f'f32[{4 * num_decodes},4,8,14]' not in text, 'a device holds the whole cache'


def test_experts_decode_single_tokens_on_an_expert_axis():
    experts = ExpertsConfig(num_experts=4, encoder_every=1, decoder_every=1)
    sizes = {'vocab_size': 32, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 16}
    layers = {'num_encoder_layers': 1, 'num_decoder_layers': 1, 'experts': experts}
    goal = EncoderDecoder(model=T5(T5Config(**sizes, **layers)))
    batch = {n: np.tile(x % 32, (2, 1)) for n, x in batch_of('t5_1_1', 'beam4').items()}
    pjit = MoePjitPartitioner(num_expert_partitions=4, num_partitions=1)
    plan = pjit.plan(functools.partial(goal.init, batch=batch), KEY)

    def run(params, batch):
        return predict(goal, params, batch, num_decodes=3, end_token=1)

    run = pjit.partition(run, (plan.specs['params'], pjit.data_partition_spec), None)
    text = run.lower(plan.abstract_state['params'], batch).as_text()
    assert text.count('all_to_all') >= 2, 'to the experts and back'


def arguments(batch):
    return {n: batch[n] for n in batch if n.endswith('tokens')}


def test_batches_that_cannot_be_decoded_are_errors():
    with pytest.raises(ConfigError, match=r'Namespace cannot predict targets.*start_decoding'):
        predict(types.SimpleNamespace(), {}, {})
    batch = batch_of('decoder_only', 'beam4')
    run = functools.partial(predict, objective('decoder_only'), {})
    with pytest.raises(ConfigError, match='prompt_with_targets is True, but a decoder-only'):
        run(batch, prompt_with_targets=True)
    with pytest.raises(ConfigError, match=r'decoder_segment_ids.*pack = False'):
        run({**batch, 'decoder_segment_ids': batch['decoder_input_tokens']})
    del batch['decoder_causal_attention']
    with pytest.raises(ConfigError, match="no 'decoder_causal_attention'"):
        run(batch)
