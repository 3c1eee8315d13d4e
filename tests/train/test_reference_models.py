"""The built-in transformer computes the same logits as Flax models of transformers.

test_huggingface.py compares it with models in PyTorch, which are files.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from train.models.forward import compute_logits
from train.models.transformer import TransformerConfig

pytestmark = pytest.mark.core

SIZES = {
    'vocab_size': 48,
    'num_layers': 3,
    'embed_dim': 16,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 8,
    'mlp_dim': 24,
    'scale_embeddings': False,
}
GEMMA = {
    'scale_embeddings': True,
    'tie_embeddings': True,
    'activation': 'gelu_tanh',
    'norm_scale_offset': True,
}
# What differs from SIZES in the Flax models, and their own settings.
FLAX = {
    'Llama': (
        {'num_kv_heads': 4, 'head_dim': 4, 'norm_epsilon': 1e-5},
        {'num_key_value_heads': 4, 'rms_norm_eps': 1e-5},
    ),
    # The Flax model sees one position more than the model in PyTorch.
    'Mistral': (
        {'head_dim': 4, 'window': 6},
        {'num_key_value_heads': 2, 'sliding_window': 5, 'rms_norm_eps': 1e-6},
    ),
    'Gemma': (
        GEMMA,
        {'num_key_value_heads': 2, 'head_dim': 8, 'hidden_activation': 'gelu_pytorch_tanh'},
    ),
    'GPT2': (
        {
            'num_kv_heads': 4,
            'head_dim': 4,
            'norm': 'layer',
            'norm_epsilon': 1e-5,
            'biases': ('qkv', 'out', 'mlp', 'norm'),
            'positions': 'learned',
            'max_positions': 32,
            'activation': 'gelu_tanh',
            'gated_mlp': False,
            'tie_embeddings': True,
        },
        {'n_embd': 16, 'n_layer': 3, 'n_head': 4, 'n_inner': 24, 'n_positions': 32},
    ),
}

# The name of each matrix and norm of a layer in PyTorch's models.
NAMES = {
    'self_attn.q_proj': 'attention/query',
    'self_attn.k_proj': 'attention/key',
    'self_attn.v_proj': 'attention/value',
    'self_attn.o_proj': 'attention/out',
    'mlp.gate_proj': 'mlp/gate',
    'mlp.up_proj': 'mlp/up',
    'mlp.down_proj': 'mlp/down',
    'input_layernorm': 'attention_norm',
    'post_attention_layernorm': 'mlp_norm',
}
TOP = {'model.embed_tokens': 'embedding', 'model.norm': 'final_norm', 'lm_head': 'output'}


def shaped(config, path, w):
    """A weight [out, in] or bias [out] of PyTorch in our shape."""
    heads = {'query': config.num_heads, 'key': config.num_kv_heads, 'value': config.num_kv_heads}
    name = path.split('/')[-1]
    if name.removesuffix('_bias') in heads:
        return w.T.reshape(*w.shape[1:], heads[name.removesuffix('_bias')], config.head_dim)
    if name == 'out':
        return w.T.reshape(config.num_heads, config.head_dim, -1)
    return w if name == 'embedding' else w.T


def params_of(config, weights):
    """Our parameters from the weights of a model by their PyTorch names."""
    layers, flat = {}, {}
    for key, w in weights.items():
        module = key.removesuffix('.weight')
        where, _, rest = module.removeprefix('model.layers.').partition('.')
        path = NAMES[rest] if module.startswith('model.layers.') else TOP[module]
        path += '/scale' if path.endswith('norm') else ''
        if module.startswith('model.layers.'):
            layers.setdefault(f'layers/{path}', {})[int(where)] = shaped(config, path, w)
        else:
            flat[path] = shaped(config, path, w)
    stacked = {path: np.stack([w[i] for i in sorted(w)]) for path, w in layers.items()}
    return unflatten_dict(flat | stacked, sep='/')


def torch_names(params):
    """Flax parameters by the names and in the shapes of PyTorch."""
    flat = {}
    for path, value in flatten_dict(params, sep='.').items():
        name = path.replace('kernel', 'weight').replace('embedding', 'weight')
        flat[name] = value.T if path.endswith('kernel') else value
    return flat


def gpt2_params(config, params):
    """Our parameters from the parameters of FlaxGPT2, whose kernels are [out, in]."""
    flat = flatten_dict(params['transformer'], sep='/')
    ours = {
        'embedding': flat['wte/embedding'],
        'position_embedding': flat['wpe/embedding'],
        'final_norm/scale': flat['ln_f/scale'],
        'final_norm/bias': flat['ln_f/bias'],
    }
    layer = {
        'ln_1/scale': 'attention_norm/scale',
        'ln_1/bias': 'attention_norm/bias',
        'ln_2/scale': 'mlp_norm/scale',
        'ln_2/bias': 'mlp_norm/bias',
        'attn/c_proj/kernel': 'attention/out',
        'attn/c_proj/bias': 'attention/out_bias',
        'mlp/c_fc/kernel': 'mlp/up',
        'mlp/c_fc/bias': 'mlp/up_bias',
        'mlp/c_proj/kernel': 'mlp/down',
        'mlp/c_proj/bias': 'mlp/down_bias',
    }
    stack = lambda name: [flat[f'h/{i}/{name}'] for i in range(config.num_layers)]  # noqa: E731
    for theirs, path in layer.items():
        ours[f'layers/{path}'] = np.stack([shaped(config, path, w) for w in stack(theirs)])
    for theirs, suffix in (('kernel', ''), ('bias', '_bias')):
        for i, name in enumerate(('query', 'key', 'value')):
            thirds = [np.split(w, 3)[i] for w in stack(f'attn/c_attn/{theirs}')]
            path = f'attention/{name}{suffix}'
            ours[f'layers/{path}'] = np.stack([shaped(config, path, w) for w in thirds])
    return unflatten_dict(ours, sep='/')


def assert_same_logits(config, params, tokens, expected):
    assert np.abs(expected).max() > 0.5
    logits, _ = jax.jit(compute_logits, static_argnums=0)(config, params, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize('name', FLAX)
def test_logits_equal_those_of_flax_models(name):
    transformers = pytest.importorskip('transformers')
    ours, theirs = FLAX[name]
    config = TransformerConfig(**(SIZES | ours))
    sizes = {'vocab_size': 48, 'max_position_embeddings': 32}
    if name != 'GPT2':
        sizes |= {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 3}
        sizes |= {'num_attention_heads': 4}
    made = getattr(transformers, f'{name}Config')(**sizes, **theirs)
    kind = 'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'
    model = getattr(transformers, f'Flax{name}{kind}')(made, _do_init=False)
    shapes = jax.eval_shape(lambda key: model.init_weights(key, (1, 1)), jax.random.key(0))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(0.1, 0.3, x.shape).astype(np.float32), shapes)
    tokens = random.integers(0, 48, (2, 20))
    expected = np.asarray(jax.jit(lambda params: model(tokens, params=params).logits)(params))
    if name == 'GPT2':
        assert_same_logits(config, gpt2_params(config, params), tokens, expected)
    else:
        assert_same_logits(config, params_of(config, torch_names(params)), tokens, expected)
