"""Runs of the shipped configurations on described machines, which benchmarks share."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShippedRun:
    """A run of shipped gin files.

    Attributes:
      name: the name in results and on the command line.
      model: the file in configs/models.
      preset: the file in configs/partitioning.
      batch: the number of sequences of a step.
      remat: what the backward pass recomputes, as a word; None if the files or `bindings` say it.
    """

    name: str
    model: str
    preset: str = 'fsdp'
    topology: str
    batch: int
    bindings: tuple[str, ...] = ()
    remat: str | None = None

    @property
    def files(self) -> list[str]:
        """The gin files, in their order."""
        names = ('runs/pretrain', f'models/{self.model}', f'partitioning/{self.preset}')
        return [f'configs/{name}.gin' for name in (*names, 'runs/forecast')]

    @property
    def all_bindings(self) -> list[str]:
        """The gin bindings, with bindings of the machine and the batch."""
        remat = () if self.remat is None else (f'TransformerConfig.remat = {self.remat!r}',)
        machine = f"TOPOLOGY = '{self.topology}'"
        return [machine, f'BATCH_SIZE = {self.batch}', *remat, *self.bindings]


# The compiler's own default: products with gathered weights are computed in pieces.
_WINDOWED = (
    "TrainConfig.compiler_options = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': None}",
)
_DOT = ('TransformerConfig.attention = @AttentionSettings()', "AttentionSettings.kind = 'dot'")
_OFFLOAD = (
    'TransformerConfig.remat = @Remat()',
    "Remat.offload = ['residual']",
    'NextToken.output = @OutputSettings()',  # without the inputs of layers, logits make the peak
    'OutputSettings.num_chunks = 16',
)
_WORDS = 'VOCAB_SIZE = 131_072'
_LONG = ('SEQUENCE_LENGTH = 131_072', 'CONTEXT_PARTITIONS = 16')
_TWO_SLICES = ('NUM_SLICES = 2',)
_PIPELINE = ('STAGES = 8', 'MICROBATCHES = 32', 'NUM_PARTITIONS = 8')
_125M: dict[str, Any] = {'model': '125m', 'topology': 'v5e:2x2'}
_FULL = {'remat': 'full'}
_1B: dict[str, Any] = {'model': '1b', 'topology': 'v5e:4x4', 'batch': 32, **_FULL}
_8B: dict[str, Any] = {'model': '8b', 'topology': 'v5p:4x4x4', 'batch': 128, **_FULL}
_8B_BOTH = _8B | {'preset': 'fsdp_tensor'}
_70B: dict[str, Any] = {'model': '70b', 'topology': 'v5p:8x8x8', 'batch': 512, **_FULL}
_V6E = {'preset': 'fsdp_tensor', 'topology': 'v6e:16x16', 'batch': 256}
_AUTO = {'remat': 'auto'}
_INT8 = ('TransformerConfig.products = @QuantizedProducts()', "QuantizedProducts.dtype = 'int8'")
_EXPERTS = (
    'SEQUENCE_LENGTH = 4096',
    'TransformerConfig.experts = @ExpertsConfig()',
    'ExpertsConfig.dropless = True',
    'ExpertsConfig.normalize_weights = True',
)
_MIXTRAL = (  # 8b.gin has its other sizes
    *_EXPERTS,
    'VOCAB_SIZE = 32_000',
    'TransformerConfig.rope_max_wavelength = 1_000_000.0',
    'ExpertsConfig.num_experts = 8',
    'ExpertsConfig.num_selected_experts = 2',
)
_QWEN3_30B = (
    *_EXPERTS,
    'VOCAB_SIZE = 151_936',
    'TransformerConfig.num_layers = 48',
    'TransformerConfig.embed_dim = 2048',
    'TransformerConfig.num_kv_heads = 4',
    'TransformerConfig.mlp_dim = 768',
    'TransformerConfig.qk_norm = True',
    'TransformerConfig.rope_max_wavelength = 10_000_000.0',
    'ExpertsConfig.num_experts = 128',
    'ExpertsConfig.num_selected_experts = 8',
)
_SETTINGS: dict[str, dict[str, Any]] = {
    '125m': {**_125M, 'batch': 32},
    '125m_data_parallel': {**_125M, 'batch': 32, 'preset': 'data_parallel'},
    '125m_tensor': {**_125M, 'batch': 8, 'preset': 'tensor', 'bindings': ('NUM_PARTITIONS = 4',)},
    '1b_dot_windowed': {**_1B, 'bindings': (*_DOT, *_WINDOWED)},
    '1b_windowed': {**_1B, 'bindings': _WINDOWED},
    '1b': _1B,
    '1b_auto': {**_1B, **_AUTO},
    '1b_128k_words_windowed': {**_1B, 'bindings': (_WORDS, *_WINDOWED)},
    '1b_128k_words': {**_1B, 'bindings': (_WORDS,)},
    '1b_128k_words_auto': {**_1B, **_AUTO, 'bindings': (_WORDS,)},
    '8b_fsdp': _8B,
    '8b_fsdp_auto': {**_8B, **_AUTO},
    '8b_fsdp_offload': {**_8B, 'remat': None, 'bindings': _OFFLOAD},
    '8b_fsdp_dots': {**_8B, 'remat': 'dots'},
    '8b_fsdp_int8': {**_8B, **_AUTO, 'bindings': _INT8},
    '8b_fsdp8_tensor8': {**_8B_BOTH, 'bindings': ('NUM_PARTITIONS = 8',)},
    '8b_fsdp16_tensor4': {**_8B_BOTH, 'bindings': ('NUM_PARTITIONS = 4',)},
    '8b_fsdp8_tensor8_auto': {**_8B_BOTH, **_AUTO, 'bindings': ('NUM_PARTITIONS = 8',)},
    '8b_fsdp16_tensor4_auto': {**_8B_BOTH, **_AUTO, 'bindings': ('NUM_PARTITIONS = 4',)},
    '8b_data_parallel': {**_8B, 'preset': 'data_parallel'},
    '8b_128k_tokens': {**_8B, 'batch': 4, 'preset': 'context', 'bindings': _LONG},
    '8b_two_slices': {**_8B, 'topology': 'v5e:16x16', 'batch': 512, 'bindings': _TWO_SLICES},
    '8b_h100': {'model': '8b', 'topology': 'h100:1x8', 'batch': 64, **_FULL},
    '70b_v5p': {**_70B, 'preset': 'fsdp_tensor'},
    '70b_v5p_auto': {**_70B, **_AUTO, 'preset': 'fsdp_tensor'},
    '70b_pipeline_v5p': {**_70B, 'preset': 'pipeline', 'bindings': _PIPELINE},
    '70b_v6e': {**_70B, **_V6E},
    '70b_v6e_auto': {**_70B, **_V6E, **_AUTO},
    'mixtral': {**_8B, **_AUTO, 'bindings': _MIXTRAL},
    'qwen3_30b': {**_8B, **_AUTO, 'bindings': _QWEN3_30B},
}
RUNS = {name: ShippedRun(name=name, **settings) for name, settings in _SETTINGS.items()}
