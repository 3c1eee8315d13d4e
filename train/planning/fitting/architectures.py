"""Architectures of Hugging Face whose size and cost our models have, and what differs.

Those that our models compute exactly are in `train.checkpoints.huggingface`. Those here have the
same matrices as our model, and so nearly the same memory and time. Each row says what our model
computes in another way. Norms and biases that differ are less than 0.1% of the parameters. None of
these models can load weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.decoders import Settings, read_llama, read_qwen2, read_qwen3
from train.planning.fitting.readers import (
    gpt_like as gpt,
    llama_like as llama,
    with_experts as experts,
)

PARTIAL = 'rotary positions turn whole heads, not only a part of each'
PARALLEL = 'attention and MLP of a layer run one after the other, not both on the same input'
SHARED_NORM = 'attention and MLP of a layer have a norm each, not one in common'
OUTPUT_NORMS = 'a layer norms the inputs of attention and MLP, not their outputs'
WHOLE_NORMS = 'queries and keys are normed head by head, not all heads at once'
ALL_ROTARY = 'all layers have rotary positions'
MULTIPLIERS = 'the multipliers of embeddings, branches and logits are 1'
NO_IMAGES = 'only the model of texts is computed, not of images'
NO_OUTPUT_BIAS = 'the output layer has no bias'


@dataclasses.dataclass(frozen=True)
class Similar:
    """An architecture with the matrices of our model.

    Attributes:
      read: the settings of our model from `config.json`.
      differs: what our model computes in another way.
      rotary_part: the part of each head that rotary positions turn, if `config.json` does not say.
      shares_norm: whether attention and MLP of a layer have one norm in common.
    """

    read: Callable[[ConfigJson], Settings]
    differs: tuple[str, ...] = ()
    rotary_part: float = 1.0
    shares_norm: Callable[[ConfigJson], bool] = lambda config: False

    def list_differences(self, config: ConfigJson) -> tuple[str, ...]:
        """Returns what our model computes in another way than the model of this file."""
        return (*self.differs, *((SHARED_NORM,) if self.shares_norm(config) else ()))


SIMILAR = {
    'arcee': Similar(llama.read_arcee),
    'bloom': Similar(
        gpt.read_bloom, ('positions are rotary, not ALiBi', 'the embeddings are not normed')
    ),
    'cohere': Similar(llama.read_cohere, (PARALLEL, SHARED_NORM, 'logits are not scaled')),
    'cohere2': Similar(
        llama.read_cohere2, (PARALLEL, SHARED_NORM, 'logits are not scaled', ALL_ROTARY)
    ),
    'ernie4_5': Similar(llama.read_ernie),
    'exaone4': Similar(llama.read_exaone4, (OUTPUT_NORMS, ALL_ROTARY)),
    'falcon': Similar(gpt.read_falcon, (PARALLEL,), shares_norm=gpt.shares_norm_in_falcon),
    'glm': Similar(llama.read_glm, rotary_part=0.5),
    'glm4': Similar(llama.read_glm4, rotary_part=0.5),
    'gpt_bigcode': Similar(gpt.read_gpt_bigcode),
    'gpt_neox': Similar(gpt.read_gpt_neox, (PARALLEL,), rotary_part=0.25),
    'gpt_oss': Similar(
        experts.read_gpt_oss,
        ('attention has no sinks', 'experts and their router have no biases'),
    ),
    'gptj': Similar(gpt.read_gptj, (PARALLEL, SHARED_NORM, PARTIAL, NO_OUTPUT_BIAS)),
    'granite': Similar(llama.read_granite, (MULTIPLIERS,)),
    'granitemoe': Similar(experts.read_granitemoe, (MULTIPLIERS,)),
    'helium': Similar(llama.read_helium),
    'hunyuan_v1_dense': Similar(
        llama.read_hunyuan, ('queries and keys are normed before they are turned, not after',)
    ),
    'ministral': Similar(llama.read_ministral),
    'mixtral': Similar(experts.read_mixtral),
    'nemotron': Similar(llama.read_nemotron, rotary_part=0.5),
    'olmo': Similar(llama.read_olmo, ('norms have a scale',)),
    'olmo2': Similar(llama.read_olmo2, (OUTPUT_NORMS, WHOLE_NORMS)),
    'olmo3': Similar(llama.read_olmo3, (OUTPUT_NORMS, WHOLE_NORMS)),
    'olmoe': Similar(experts.read_olmoe, (WHOLE_NORMS,)),
    'opt': Similar(gpt.read_opt),
    'phi': Similar(gpt.read_phi, (PARALLEL, SHARED_NORM, NO_OUTPUT_BIAS), rotary_part=0.5),
    'phi3': Similar(llama.read_phi3),
    'qwen2_5_vl': Similar(read_qwen2, (NO_IMAGES,)),
    'qwen2_moe': Similar(experts.read_qwen2_moe),
    'qwen2_vl': Similar(read_qwen2, (NO_IMAGES,)),
    'qwen3_moe': Similar(experts.read_qwen3_moe),
    'qwen3_vl': Similar(read_qwen3, (NO_IMAGES,)),
    'qwen3_vl_moe': Similar(experts.read_qwen3_moe, (NO_IMAGES,)),
    'seed_oss': Similar(llama.read_seed_oss),
    'smollm3': Similar(read_llama, (ALL_ROTARY,)),
    'stablelm': Similar(llama.read_stablelm, rotary_part=0.25),
    'starcoder2': Similar(gpt.read_starcoder2),
    'vaultgemma': Similar(llama.read_vaultgemma),
}
