"""Models of Hugging Face: small ones in files, and the settings of published ones."""

import shutil
from pathlib import Path

from etils import epath

from train.checkpoints.huggingface.config_json import read_config

FOLDER = Path(__file__).parent / 'reference_models'
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def copy(name, folder):
    """Copies a written model, and returns its folder."""
    shutil.copytree(FOLDER / name, folder / name)
    return epath.Path(folder / name)


def config_of(name):
    return read_config(epath.Path(FOLDER / name))


_8B = {
    'hidden_size': 4096,
    'num_hidden_layers': 32,
    'num_attention_heads': 32,
    'num_key_value_heads': 8,
    'intermediate_size': 14336,
}
_SCALING = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
}


def sizes(width, layers, heads, kv_heads, mlp, vocab, **others):
    return {
        'hidden_size': width,
        'num_hidden_layers': layers,
        'num_attention_heads': heads,
        'num_key_value_heads': kv_heads,
        'intermediate_size': mlp,
        'vocab_size': vocab,
        **others,
    }


# The settings of published files, and the number of parameters that the model cards state.
MODELS = {
    'Llama-3.1-8B': (
        {'model_type': 'llama', **_8B, 'vocab_size': 128256, 'rope_theta': 500000.0}
        | {'max_position_embeddings': 131072, 'rope_scaling': _SCALING},
        8_030_261_248,
    ),
    'Mistral-7B-v0.1': ({'model_type': 'mistral', **_8B, 'vocab_size': 32000}, 7_241_732_096),
    'Qwen2.5-7B': (sizes(3584, 28, 28, 4, 18944, 152064, model_type='qwen2'), 7_615_616_512),
    'Qwen3-8B': (sizes(4096, 36, 32, 8, 12288, 151936, model_type='qwen3'), 8_190_735_360),
    'gemma-7b': (
        sizes(3072, 28, 16, 16, 24576, 256000, model_type='gemma', head_dim=256),
        8_537_680_896,
    ),
    'gemma-2-9b': (
        sizes(3584, 42, 16, 8, 14336, 256000, model_type='gemma2', head_dim=256),
        9_241_705_984,
    ),
    'gemma-3-1b': (
        sizes(1152, 26, 4, 1, 6912, 262144, model_type='gemma3_text', head_dim=256),
        999_885_952,
    ),
    'gpt2': (
        {'model_type': 'gpt2', 'vocab_size': 50257, 'n_embd': 768, 'n_layer': 12, 'n_head': 12},
        124_439_808,
    ),
    'Phi-3-mini-128k': (
        sizes(3072, 32, 32, 32, 8192, 32064, model_type='phi3')
        | {'rope_scaling': {'type': 'longrope', 'short_factor': [1.0], 'long_factor': [2.0]}},
        3_821_079_552,
    ),
    'starcoder2-3b': (
        sizes(3072, 30, 24, 2, 12288, 49152, model_type='starcoder2')
        | {'hidden_act': 'gelu_pytorch_tanh', 'sliding_window': 4096},
        3_030_371_328,
    ),
    'pythia-6.9b': (
        sizes(4096, 32, 32, None, 16384, 50432, model_type='gpt_neox', rotary_pct=0.25),
        6_857_302_016,
    ),
    'stablelm-3b-4e1t': (
        sizes(2560, 32, 32, 32, 6912, 50304, model_type='stablelm', partial_rotary_factor=0.25),
        2_795_443_200,
    ),
    'SmolLM3-3B': (
        sizes(2048, 36, 16, 4, 11008, 128256, model_type='smollm3', tie_word_embeddings=True),
        3_075_098_624,
    ),
    'Nemotron-Mini-4B': (
        sizes(3072, 32, 24, 8, 9216, 256000, model_type='nemotron', head_dim=128),
        4_190_509_056,
    ),
    'falcon-40b': (
        sizes(8192, 60, 128, None, None, 65024, model_type='falcon', num_kv_heads=8)
        | {'new_decoder_architecture': True},
        41_303_293_952,
    ),
    'starcoder': (
        {'model_type': 'gpt_bigcode', 'vocab_size': 49152, 'n_embd': 6144, 'n_layer': 40}
        | {'n_head': 48, 'n_positions': 8192, 'n_inner': 24576, 'multi_query': True},
        15_517_456_384,
    ),
    'Mixtral-8x7B-v0.1': (
        {'model_type': 'mixtral', **_8B, 'vocab_size': 32000, 'rope_theta': 1000000.0}
        | {'num_local_experts': 8, 'num_experts_per_tok': 2, 'router_aux_loss_coef': 0.02},
        46_702_792_704,
    ),
    'Qwen3-30B-A3B': (
        sizes(2048, 48, 32, 4, 6144, 151936, model_type='qwen3_moe', head_dim=128)
        | {'num_experts': 128, 'num_experts_per_tok': 8, 'moe_intermediate_size': 768}
        | {'norm_topk_prob': True, 'mlp_only_layers': []},
        30_532_122_624,
    ),
    'opt-125m': (
        sizes(768, 12, 12, None, None, 50272, model_type='opt', ffn_dim=3072)
        | {'max_position_embeddings': 2048, 'word_embed_proj_dim': 768},
        125_239_296,
    ),
    'flan-t5-base': (
        {'model_type': 't5', 'vocab_size': 32128, 'd_model': 768, 'num_heads': 12, 'd_kv': 64}
        | {'d_ff': 2048, 'num_layers': 12, 'feed_forward_proj': 'gated-gelu'}
        | {'tie_word_embeddings': False, 'is_encoder_decoder': True},
        247_577_856,
    ),
    'GLM-4-9B-0414': (
        sizes(4096, 40, 32, 2, 13696, 151552, model_type='glm4', head_dim=128)
        | {'attention_bias': True, 'partial_rotary_factor': 0.5},
        9_400_279_040,
    ),
    'glm-4-9b-hf': (
        sizes(4096, 40, 32, 2, 13696, 151552, model_type='glm', head_dim=128)
        | {'attention_bias': True, 'partial_rotary_factor': 0.5},
        9_399_951_360,
    ),
    'Seed-OSS-36B': (
        sizes(5120, 64, 80, 8, 27648, 155136, model_type='seed_oss', head_dim=128)
        | {'attention_bias': True, 'attention_out_bias': False},
        36_151_104_512,
    ),
    'ERNIE-4.5-0.3B': (
        sizes(1024, 18, 16, 2, 3072, 103424, model_type='ernie4_5', head_dim=128)
        | {'tie_word_embeddings': True},
        360_748_032,
    ),
    'EXAONE-4.0-32B': (
        sizes(5120, 64, 40, 8, 27392, 102400, model_type='exaone4', head_dim=128)
        | {'sliding_window': 4096, 'sliding_window_pattern': 'LLLG'},
        32_003_216_384,
    ),
    'helium-1-preview-2b': (
        sizes(2560, 24, 20, 20, 7040, 48000, model_type='helium', head_dim=128),
        2_172_643_840,
    ),
    'vaultgemma-1b': (
        sizes(1152, 26, 4, 4, 6912, 256000, model_type='vaultgemma', head_dim=256),
        1_038_741_120,
    ),
    'Qwen2.5-VL-7B': (
        sizes(3584, 28, 28, 4, 18944, 152064, model_type='qwen2_5_vl')
        | {'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]}},
        7_615_616_512,  # of Qwen2.5-7B, which reads its texts
    ),
}

# Models whose norms or biases ours have in another number.
NEAR_MODELS = {
    'c4ai-command-r-v01': (
        sizes(8192, 40, 64, 64, 22528, 256000, model_type='cohere', logit_scale=0.0625),
        34_980_831_232,
    ),
    'phi-2': (
        sizes(2560, 32, 32, 32, 10240, 51200, model_type='phi', partial_rotary_factor=0.4),
        2_779_683_840,
    ),
    'OLMo-2-1124-7B': (sizes(4096, 32, 32, 32, 11008, 100352, model_type='olmo2'), 7_298_617_344),
    'OLMoE-1B-7B': (
        sizes(2048, 16, 16, 16, 1024, 50304, model_type='olmoe')
        | {'num_experts': 64, 'num_experts_per_tok': 8},
        6_919_161_856,
    ),
    'gpt-j-6b': (
        {'model_type': 'gptj', 'vocab_size': 50400, 'n_embd': 4096, 'n_layer': 28, 'n_head': 16}
        | {'n_positions': 2048, 'rotary_dim': 64, 'activation_function': 'gelu_new'},
        6_050_882_784,
    ),
    'gpt-oss-20b': (
        sizes(2880, 24, 64, 8, 2880, 201088, model_type='gpt_oss', head_dim=64)
        | {'num_local_experts': 32, 'num_experts_per_tok': 4, 'sliding_window': 128},
        20_914_757_184,
    ),
    'falcon-7b': (
        sizes(4544, 32, 71, None, None, 65024, model_type='falcon', multi_query=True)
        | {'parallel_attn': True, 'new_decoder_architecture': False, 'bias': False},
        6_921_720_704,
    ),
    'bloom-7b1': (
        {'model_type': 'bloom', 'vocab_size': 250880, 'n_embed': 4096, 'n_layer': 30}
        | {'num_attention_heads': 32},
        7_069_016_064,
    ),
}
