"""Models of Hugging Face: their parameters, their gin files, and the machines they fit into."""

import dataclasses
import json
from types import SimpleNamespace

import gin
import jax
import pytest
from gin_fixtures import load_config
from hugging_face_models import MODELS, NEAR_MODELS, sizes
from small import small_config

from partitioning import PjitPartitioner
from partitioning.hardware import CHIPS, stand_in_devices
from train import NextToken
from train.checkpoints.huggingface.config_json import ConfigJson
from train.cli.fitting import find_machines
from train.data import RandomTokens
from train.errors import ConfigError
from train.gin.load import find_config
from train.models.transformer import Transformer
from train.planning import fits
from train.planning.candidates import Workload, change_run
from train.planning.fits import find_smallest, fit_machine, list_machines
from train.planning.gin_text import PRETRAIN, write_fit, write_pretraining
from train.planning.huggingface.counted import count_model, fit_counted, judge
from train.planning.huggingface.models import choose_rows, find_model, parse_tokens, read_model
from train.planning.machines import parse_machine

pytestmark = pytest.mark.core


def model_of(name, **settings):
    values, _ = {**MODELS, **NEAR_MODELS}[name]
    return read_model(ConfigJson(values, f'{name}/config.json'), **settings)


@pytest.mark.parametrize('name', MODELS)
def test_a_model_has_as_many_parameters_as_its_model_card_says(name):
    assert model_of(name).num_parameters == MODELS[name][1]


@pytest.mark.parametrize('name', NEAR_MODELS)
def test_a_model_with_other_norms_or_biases_says_so_and_has_nearly_as_many(name):
    model, expected = model_of(name), NEAR_MODELS[name][1]
    assert model.num_parameters == pytest.approx(expected, rel=5e-4)
    assert model.num_parameters != expected
    assert any('norm' in text or 'bias' in text for text in model.differs)


def test_what_our_model_computes_in_another_way_is_said():
    assert model_of('Llama-3.1-8B').differs == ()
    assert model_of('Phi-3-mini-128k').differs == ('rotary positions are not scaled (longrope)',)
    partial, parallel = model_of('pythia-6.9b').differs
    assert 'rotary' in partial and 'one after the other' in parallel
    # Both names of the part that is turned mean the same.
    newer = {**MODELS['pythia-6.9b'][0], 'partial_rotary_factor': 0.25}
    assert read_model(ConfigJson(newer, 'config.json')).differs == (partial, parallel)
    images = {'model_type': 'llava', 'text_config': MODELS['Mistral-7B-v0.1'][0]}
    found = read_model(ConfigJson(images, 'config.json'))
    assert found.kind == 'mistral' and 'not of images' in found.differs[0]
    text = {**MODELS['Qwen3-8B'][0], 'model_type': 'qwen3_vl_text'}
    found = read_model(ConfigJson({'model_type': 'qwen3_vl', 'text_config': text}, 'config.json'))
    assert found.num_parameters == MODELS['Qwen3-8B'][1]
    assert len(found.differs) == 1 and 'not of images' in found.differs[0]


@pytest.fixture
def work_of(tmp_path):
    """Makes the run of a decoder, with settings of Python and not of gin."""

    def make(model, tokens, length):
        with stand_in_devices(jax.devices()[:1]):
            config = small_config(
                tmp_path,
                tmp_path,
                objective=NextToken(model=Transformer(model.config)),
                partitioner=PjitPartitioner(num_partitions=1),
                task=RandomTokens(vocab_size=model.config.vocab_size),
                batch_size=tokens // length,
                sequence_length=length,
            )
        return Workload(config=config, num_parameters=model.num_parameters)

    return make


@pytest.mark.parametrize(
    'name',
    [
        'Llama-3.1-8B',
        'gpt2',
        'gemma-2-9b',
        'Mixtral-8x7B-v0.1',
        pytest.param('flan-t5-base', marks=pytest.mark.long),
    ],
)
def test_the_gin_settings_train_the_model_of_the_file(name):
    model = model_of(name, dtype='bfloat16')
    lines = write_pretraining(model.config, batch_size=16, sequence_length=512)
    gin.clear_config()
    load_config([PRETRAIN], ["TEXT = 'corpus/*.txt'", *filter(None, lines)])
    config = find_config()
    assert config.objective.model.config == model.config
    assert config.batch_size == 16
    row = config.task.blank_row(config.sequence_length)
    longest = row.get('encoder_input_tokens', row['decoder_input_tokens'])
    assert longest.shape == (512,)
    assert Workload.of_run(config).num_parameters == model.num_parameters
    gin.clear_config()


def test_a_small_model_fits_with_everything_kept(work_of, tmp_path):
    """And the written file has the settings that were forecast."""
    small = sizes(256, 2, 4, 4, 512, 1024, model_type='llama')
    model = read_model(ConfigJson(small, 'config.json'), dtype='bfloat16')
    work = work_of(model, 64 * 128, 128)
    fit = fit_machine(work, parse_machine('v5e:2x2'))
    assert fit.fits and str(fit.candidate) == 'fsdp, remat none'
    # Parameters and two moments in float32, over 4 devices: 12 bytes for each.
    memory = fit.forecast.memory
    count = 2 * 1024 * 256 + 2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256) + 256
    assert model.num_parameters == count
    assert memory.parameters == count
    assert memory.optimizer == pytest.approx(2 * count, rel=1e-4)
    lines = write_pretraining(model.config, batch_size=64, sequence_length=128)
    (tmp_path / 'written.gin').write_text(write_fit(model, fit, lines))
    there = change_run(work.config, fit.candidate, fit.machine)
    gin.clear_config()
    load_config([str(tmp_path / 'written.gin')], ["TEXT = 'corpus/*.txt'"])
    assert find_config().objective.model.config == there.objective.model.config
    assert find_config().partitioner.logical_axis_rules == there.partitioner.logical_axis_rules
    gin.clear_config()


def test_the_machines_that_can_hold_a_state(work_of):
    """With one row of 64 tokens, the activations of a step are negligible.

    Each of the 8.03 B parameters needs 14 bytes: the parameter and two moments in float32, and the
    gradient in bfloat16. These 104.7 GiB need 7 chips of v5e with 15.75 GiB each, so the first
    machine has 8 chips. The smallest host of v5p, with 4 times 95 GiB, and 2 H100 are enough.
    """
    work = work_of(model_of('Llama-3.1-8B', dtype='bfloat16'), 64, 64)
    names = [str(machine) for machine in list_machines(work, CHIPS['v5e'])]
    assert names == ['v5e:2x4', 'v5e:4x4', 'v5e:4x8', 'v5e:8x8', 'v5e:8x16', 'v5e:16x16']
    assert next(map(str, list_machines(work, CHIPS['v5p']))) == 'v5p:2x2x1'
    assert next(map(str, list_machines(work, CHIPS['h100']))) == 'h100:1x2'


def test_the_least_memory_of_a_run(work_of):
    """Counted by hand: the state, gradients, and the inputs of 32 layers of 4096 in bfloat16."""
    work = work_of(model_of('Llama-3.1-8B', dtype='bfloat16'), 2**22, 4096)
    count, tokens = 8_030_261_248, 2**22 // 16
    sizes = work.sizes_on(parse_machine('v5e:4x4'))
    assert work.least_peak(sizes, 1) == count * 14 / 16 + tokens * 32 * 4096 * 2
    assert work.least_peak(sizes, 8) == count * 18 / 16 + tokens * 32 * 4096 * 2 / 8
    kept = work.least_peak(sizes, 1, keeps_products=True)
    assert kept == count * 14 / 16 + tokens * 32 * (4096 + 2 * 14_336) * 2


def test_what_a_batch_needs_is_divided_by_its_microbatches(work_of):
    """The peaks of 8 and 32 microbatches are on one line over 1 / n: so is the one of 16."""
    work = work_of(model_of('Llama-3.1-8B', dtype='bfloat16'), 2**22, 4096)
    fixed, of_batch = 20 * 8_030_261_248 / 16, 100 * 2**30
    peak = round(fixed + of_batch / 8)
    assert work.bytes_of_batch(16, 8, peak) == pytest.approx(of_batch)
    assert work.expected_peak(16, 32, of_batch) == pytest.approx(fixed + of_batch / 32)


@pytest.fixture
def tried(monkeypatch):
    """The numbers of microbatches that are tried, of a model whose peaks follow a formula."""
    numbers = []

    def forecast(work, fit, **settings):
        candidate, devices = fit.candidate, fit.sizes.num_devices
        if candidate.remat != 'full':
            raise ValueError('not here')
        number = candidate.num_microbatches
        numbers.append((devices, number))
        peak = (14 if number == 1 else 19) * 8_030_261_248 + 1500 * 2**30 / number
        peak, limit = round(peak / devices), CHIPS['v5e'].hbm_bytes
        memory = SimpleNamespace(peak=peak, limit=limit)
        return dataclasses.replace(
            fit, forecast=SimpleNamespace(memory=memory, fits=peak <= limit, time=None)
        )

    monkeypatch.setattr(fits, 'forecast_fit', forecast)
    return numbers


@pytest.mark.parametrize('devices, shape', [(16, '4x4'), (32, '4x8'), (64, '8x8'), (256, '16x16')])
def test_the_fewest_microbatches_that_fit_are_found_with_few_tries(tried, work_of, devices, shape):
    work = work_of(model_of('Llama-3.1-8B', dtype='bfloat16'), 2**22, 4096)
    found = fit_machine(work, parse_machine(f'v5e:{shape}'))
    fitting = [
        n
        for n in (1, 2, 4, 8, 16, 32, 64)
        if (14 if n == 1 else 19) * 8_030_261_248 + 1500 * 2**30 / n
        <= devices * CHIPS['v5e'].hbm_bytes
    ]
    assert found.fits and found.candidate.num_microbatches == fitting[0]
    assert len(tried) <= 3


def test_nothing_is_tried_twice(tried, work_of):
    """The smallest machine that fits is one that was asked about; 2x4 is excluded by its state."""
    work = work_of(model_of('Llama-3.1-8B', dtype='bfloat16'), 2**22, 4096)
    known = {}
    fit = fit_machine(work, parse_machine('v5e:4x4'), None, known)
    before = list(tried)
    assert fit.fits and find_smallest(work, CHIPS['v5e'], None, known) is fit
    assert tried == before


def test_tokens_of_a_batch():
    assert [parse_tokens(text) for text in ('4M', '512K', '65536')] == [4194304, 524288, 65536]
    for text in ('-4M', '0', '4.5M', '4m', '', '1G'):
        with pytest.raises(ValueError, match='number of tokens, such as 4M'):
            parse_tokens(text)
    model = model_of('gpt2')
    assert choose_rows(model, 65536, None) == {'batch_size': 64, 'sequence_length': 1024}
    with pytest.raises(ConfigError, match=r'65000 is not a multiple of the 1024.*write 64512'):
        choose_rows(model, 65000, None)
    with pytest.raises(ConfigError, match='--sequence_length=2048, but the gpt2 has 1024'):
        choose_rows(model, 65536, 2048)
    with pytest.raises(ConfigError, match='--sequence_length is -1'):
        choose_rows(model, 65536, -1)


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('{"model_type": "lama"}', ["'lama'", "Did you mean 'llama'?", 'starcoder2']),
        ('{"model_type": "rwkv"}', ["'rwkv'", 'The known ones are', 'gpt_neox', 'meshwright dry']),
        ('{"hidden_size": 4096}', ['has no model_type']),
        ('[1, 2]', ['no JSON object']),
        ('{"model_type": ', ['cannot be read']),
        ('[' * 100_000, ['cannot be read']),
        ('{"model_type": "opt", "hidden_size": "wide"}', ['config.json']),
        ('{"model_type": "phi3", "hidden_size": 64}', ['config.json has no', 'phi3 needs it']),
        ('{"model_type": {"a": 1}}', ['model_type is']),
    ],
)
def test_a_malformed_config_is_refused_in_one_line(tmp_path, text, words):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ConfigError) as error:
        find_model(str(tmp_path))
    message = str(error.value)
    assert '\n' not in message and not [word for word in words if word not in message]


# Settings as the models' own files have them, each with the parameters and the active ones that
# others have published: of MaxText's measured steps, of the cards of Qwen, and of state-spaces.
DEEPSEEK = {
    'first_k_dense_replace': 3,
    'hidden_size': 7168,
    'intermediate_size': 18_432,
    'kv_lora_rank': 512,
    'model_type': 'deepseek_v3',
    'moe_intermediate_size': 2048,
    'n_routed_experts': 256,
    'n_shared_experts': 1,
    'num_attention_heads': 128,
    'num_experts_per_tok': 8,
    'num_hidden_layers': 61,
    'q_lora_rank': 1536,
    'qk_nope_head_dim': 128,
    'qk_rope_head_dim': 64,
    'topk_method': 'noaux_tc',
    'v_head_dim': 128,
    'vocab_size': 129_280,
    'tie_word_embeddings': False,
}
SMALLER = DEEPSEEK | {
    'first_k_dense_replace': 1,
    'hidden_size': 2048,
    'intermediate_size': 10_944,
    'model_type': 'deepseek_v2',
    'moe_intermediate_size': 1408,
    'n_routed_experts': 64,
    'n_shared_experts': 2,
    'num_attention_heads': 16,
    'num_experts_per_tok': 6,
    'num_hidden_layers': 27,
    'q_lora_rank': None,
    'topk_method': 'greedy',
    'vocab_size': 102_400,
}
SCOUT = {
    'hidden_size': 5120,
    'intermediate_size': 8192,
    'intermediate_size_mlp': 16_384,
    'interleave_moe_layer_step': 1,
    'model_type': 'llama4_text',
    'num_attention_heads': 40,
    'num_hidden_layers': 48,
    'num_key_value_heads': 8,
    'num_local_experts': 16,
    'vocab_size': 202_048,
}
QWEN = {
    'hidden_size': 2048,
    'intermediate_size': 5632,
    'model_type': 'qwen2_moe',
    'moe_intermediate_size': 1408,
    'num_attention_heads': 16,
    'num_experts': 60,
    'num_experts_per_tok': 4,
    'num_hidden_layers': 24,
    'num_key_value_heads': 16,
    'shared_expert_intermediate_size': 5632,
    'vocab_size': 151_936,
}
MAMBA = {'hidden_size': 768, 'model_type': 'mamba', 'num_hidden_layers': 24, 'vocab_size': 50_280}


@pytest.mark.parametrize(
    'values, whole, active',
    [
        (DEEPSEEK, 671_026_279_424, 36_624_596_992),
        (SMALLER, 15_706_470_400, 2_451_308_544),
        (SCOUT, 107_769_861_120, 16_137_912_320),
        (
            SCOUT | {'num_local_experts': 128, 'interleave_moe_layer_step': 2},
            400_711_848_960,
            16_149_708_800,
        ),
        (QWEN, 14_315_784_192, None),
        (MAMBA, 129_135_360, None),
    ],
)
def test_layers_that_our_models_do_not_have_are_counted(values, whole, active):
    found = count_model(ConfigJson(values, 'config.json'))
    assert found.num_parameters == pytest.approx(whole, rel=2e-6)
    if active is not None:
        assert found.active_parameters == pytest.approx(active, rel=2e-4)


def test_flops_and_memory_of_counted_models():
    """250.45 GFLOP per token with rows of 4,096, as MaxText counts causal attention."""
    found = count_model(ConfigJson({'text_config': DEEPSEEK}, 'config.json'))
    assert found.flops_per_token(4096) == pytest.approx(250.45e9, rel=1e-3)
    small, large = (
        fit_counted(found, parse_machine(name), 1024, 4096) for name in ('v5p:4x4x4', 'v5p:8x8x16')
    )
    # 14 bytes per parameter and more: 147 GB on 64 chips, and 9.2 GB on 1,024.
    assert small.verdict == 'no' and small.peak > 14 * 671e9 / 64
    assert large.verdict == 'yes' and 9.2e9 < large.peak < 40e9
    assert large.flops == pytest.approx(250.45e9 * 4096, rel=1e-3)
    assert [judge(peak, 100, 0.3) for peak in (70, 90, 140, 150)] == ['yes', 'close', 'close', 'no']


def test_fits_answers_for_counted_models(tmp_path, capsys):
    (tmp_path / 'config.json').write_text(json.dumps(DEEPSEEK))
    command = [str(tmp_path), '--topology=v5p:8x8x16', '--topology=v5p:4x4x4']
    assert find_machines(command, 'fits') == 1
    text = capsys.readouterr().out
    assert '671.03 B parameters' in text and 'latent attention' in text
    assert 'meshwright dry' in text and 'v5p:8x8x16' in text
    assert find_machines([*command, '--out=run.gin'], 'fits') == 2
    assert 'leave it out' in capsys.readouterr().err
    (tmp_path / 'config.json').write_text('{"model_type": "deepseek_v3", "hidden_size": "wide"}')
    assert find_machines(command, 'fits') == 2
    assert capsys.readouterr().err.count('\n') == 1
