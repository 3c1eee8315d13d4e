"""The settings of Hugging Face's models: `config.json` in both directions, and what is refused."""

import dataclasses
import json

import pytest
from etils import epath
from hugging_face_models import NAMES, config_of, copy

from train.checkpoints.huggingface import decoders
from train.checkpoints.huggingface.architectures import ARCHITECTURES, describe_model, model_config
from train.checkpoints.huggingface.config_json import ConfigJson, read_config
from train.errors import ConfigError
from train.models.t5 import T5Config

pytestmark = pytest.mark.core


@pytest.mark.parametrize('name', NAMES)
def test_settings_become_a_configuration_and_back(name):
    config = config_of(name)
    model = model_config(config)
    kind, settings = describe_model(model)
    assert kind == config.values['model_type']
    same = model_config(ConfigJson({'model_type': kind, **settings}, 'here'))
    assert dataclasses.asdict(same) == dataclasses.asdict(model)


# A model, settings of its config.json, and what they change.
SETTINGS = [
    ('llama3_1', {'rope_scaling': None}, {'rope_scaling': None}),
    ('llama3_1', {'attention_bias': True, 'mlp_bias': True}, {'biases': ('qkv', 'out', 'mlp')}),
    (
        'llama3_1',
        {'head_dim': None, 'num_key_value_heads': None},
        {'head_dim': 4, 'num_kv_heads': 4},
    ),
    # The form of transformers 5.
    (
        'llama3_1',
        {'rope_parameters': {'rope_type': 'default', 'rope_theta': 7.0}, 'rope_scaling': None},
        {'rope_max_wavelength': 7.0, 'rope_scaling': None},
    ),
    ('mistral', {'sliding_window': None}, {'window': None}),
    (
        'qwen2',
        {'use_sliding_window': True, 'layer_types': None, 'max_window_layers': 0},
        {'window': 4096},
    ),
    ('gemma2', {'layer_types': None}, {'window': 5, 'global_every': 2}),
    ('gemma3', {'layer_types': None}, {'window': 5, 'global_every': 0}),  # fewer than six layers
    ('gpt2', {'n_inner': 40}, {'mlp_dim': 40}),
    ('t5', {'feed_forward_proj': 'gated-gelu'}, {'mlp_activations': ('gelu', 'linear')}),
    ('t5', {'model_type': 'mt5', 'feed_forward_proj': None}, {'logits_via_embedding': False}),
]


@pytest.mark.parametrize(('name', 'changes', 'expected'), SETTINGS)
def test_other_settings_are_read(name, changes, expected):
    values = config_of(name).values | changes
    model = model_config(ConfigJson(values, 'config.json'))
    assert {key: getattr(model, key) for key in expected} == expected


REFUSED = [
    ('llama3_1', {'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ('llama3_1', {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, "rope_type .* 'yarn'"),
    ('llama3_1', {'rope_scaling': {'rope_type': 'linear'}}, 'malformed.*factor'),
    ('llama3_1', {'rope_scaling': 'yes'}, 'malformed'),
    ('llama3_1', {'hidden_size': None}, 'has no hidden_size'),
    ('llama3_1', {'hidden_size': 'wide'}, r"embed_dim is 'wide'|hidden_size is 'wide'"),
    ('llama3_1', {'head_dim': None, 'num_attention_heads': 5}, 'hidden_size is 16'),
    ('llama3_1', {'head_dim': None, 'num_attention_heads': 0}, 'hidden_size is 16'),
    ('llama3_1', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor is 0.5'),
    ('mistral', {'num_hidden_layers': 10**12}, 'num_hidden_layers is 1,000,000,000,000: at most'),
    ('qwen2', {'layer_types': ['full_attention', *['sliding_attention'] * 2]}, 'layer_types'),
    ('qwen2', {'layer_types': ['chunked_attention'] * 3}, "'chunked_attention'"),
    ('gemma2', {'hidden_activation': 'gelu'}, "hidden_activation is 'gelu'"),
    ('gpt2', {'activation_function': 'gelu'}, "activation_function is 'gelu'"),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx'),
    ('t5', {'feed_forward_proj': 'gelu'}, "feed_forward_proj is 'gelu'"),
    ('t5', {'relative_attention_num_buckets': 64}, 'relative_attention_num_buckets is 64'),
    ('t5', {'layer_norm_epsilon': 1e-5}, 'layer_norm_epsilon is 1e-05'),
    ('t5', {'model_type': 'mamba'}, "model_type is 'mamba'.* llama, mistral"),
    ('t5', {'model_type': ['t5']}, 'model_type is'),
    ('t5', {'model_type': None}, 'model_type is None'),
]


@pytest.mark.parametrize(('name', 'changes', 'message'), REFUSED)
def test_what_a_model_cannot_compute_is_named(name, changes, message):
    values = config_of(name).values | changes
    if 'layer_types' in changes:
        values |= {'use_sliding_window': True, 'sliding_window': 5}
    with pytest.raises(ConfigError, match=rf'the config\.json.*(?:{message})') as error:
        model_config(ConfigJson(values, 'the config.json'))
    assert len(str(error.value).splitlines()) == 1


def test_an_unknown_setting_of_our_model_is_named():
    with pytest.raises(ConfigError, match=r"TransformerConfig has no setting 'remta'.*'remat'"):
        model_config(config_of('llama3_1'), remta='full')


@pytest.mark.parametrize('content', ['{', '[]', '"x"', '[' * 10_000, ' ' * 2**21 + '{}'])
def test_a_malformed_configuration_is_refused(content, tmp_path):
    (tmp_path / 'config.json').write_text(content)
    with pytest.raises(ConfigError, match=r'config\.json cannot be read'):
        read_config(epath.Path(tmp_path))


@pytest.mark.parametrize('method', ['gptq', 'fp8'])
def test_quantized_models_are_refused(method, tmp_path):
    folder = copy('llama3_1', tmp_path)
    values = config_of('llama3_1').values
    changes = {'quantization_config': {'quant_method': method, 'bits': 4}}
    (folder / 'config.json').write_text(json.dumps(dict(values) | changes))
    with pytest.raises(ConfigError, match=rf"quantized .*'{method}'.*use the weights"):
        read_config(folder)


def test_adapters_and_names_of_the_hub_are_not_models(tmp_path):
    with pytest.raises(ConfigError, match=r'org/model is not a folder: download'):
        read_config(epath.Path('org/model'))
    (tmp_path / 'adapter_config.json').write_text('{}')
    with pytest.raises(ConfigError, match=r'is an adapter.*merge_and_unload'):
        read_config(epath.Path(tmp_path))


def test_every_architecture_has_a_fixture():
    kinds = {config_of(name).values['model_type'] for name in NAMES}
    assert kinds == ARCHITECTURES.keys() - {'mt5'}  # that one differs from t5 in its defaults
    assert {c.kind for c in ARCHITECTURES.values()} == {T5Config, decoders.TransformerConfig}
