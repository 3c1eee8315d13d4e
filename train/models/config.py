"""The settings of the built-in transformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from train.attention import AttentionSettings
from train.errors import ConfigError, check_fields
from train.models.experts.config import ExpertsConfig
from train.models.pipeline.stages import Pipeline
from train.models.quantized import QuantizedProducts
from train.models.remat import Remat, check_placed, list_remats

RematWord = Literal['none', 'dots', 'full', 'auto']
Activation = Literal['silu', 'gelu', 'gelu_tanh', 'relu', 'relu2']
Bias = Literal['qkv', 'out', 'mlp', 'norm']
DType = Literal['float32', 'bfloat16']


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Longer wavelengths of rotary positions, for contexts longer than those first trained on.

    Attributes:
      factor: multiplies the wavelengths.
      original_length: the context length of the first training. 0 multiplies all wavelengths, and
        any other value only long ones, as in Llama 3.1.
      low_frequency_factor: wavelengths above original_length / low_frequency_factor are multiplied.
      high_frequency_factor: those below original_length / high_frequency_factor are kept.
    """

    factor: float
    original_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self) -> None:
        check_fields(RopeScaling, self, 'RopeScaling.', original_length='[0, inf)')
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if not low < high:
            raise ConfigError(
                f'RopeScaling has low_frequency_factor {low} and high_frequency_factor {high}: use '
                'low < high'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a Transformer. The defaults are Llama's, with scaled embeddings.

    Attributes:
      vocab_size: the number of tokens.
      num_layers: the number of layers.
      embed_dim: the width of the residual stream.
      num_heads: the number of query heads, a multiple of `num_kv_heads`.
      num_kv_heads: the number of key and value heads.
      head_dim: the width of a head, an even number for rotary positions.
      mlp_dim: the width of the hidden layer.
      dropout_rate: the dropout rate of attention and MLP outputs during training.
      dtype: the dtype of the computation, 'float32' or 'bfloat16'. Norms, softmax and the loss are
        always computed in float32.
      param_dtype: the dtype of the parameters, 'float32' or 'bfloat16'.
      gradient_dtype: the dtype in which devices sum the gradients of the matrices, by default the
        dtype of the computation. 'float32' sends twice the bytes of 'bfloat16'.
      products: the products of layers in 8 bits. By default, they are in `dtype`. Not for experts.
      remat: what the backward pass recomputes: 'none' (in a scan, what is computed element by
        element), 'dots' (everything except matmul results), 'full' (everything), or a `Remat`,
        which lists what is kept. Of a list of these, layer n takes entry n modulo the length; a
        scan then traces one layer per entry. 'auto' keeps what fits into the memory of the devices,
        see `train.running.rematerialization`; outside of a run, it is 'full'.
      scan_layers: whether the layers are scanned. A scan traces one layer and stacks the
        parameters; otherwise every layer is traced.
      scan_unroll: the number of layers in one iteration of the compiled loop over scanned layers.
        It divides `num_layers`, and the number of entries of `remat` divides it. By default, it
        is that number.
      pipeline: runs scanned layers in stages, over the mesh axis that the rules give to 'layers'.
        With a cache, the layers run one after another.
      scale_embeddings: whether embeddings are multiplied by the square root of `embed_dim`.
      tie_embeddings: whether the output layer is the transpose of the embedding.
      activation: the activation function of the hidden layer, or of its gate. 'gelu' is exact,
        'gelu_tanh' is the approximation that GPT-2 and Gemma use, and 'relu2' is the squared relu.
      gated_mlp: whether the hidden layer is the product of a gate and a linear map.
      experts: how tokens are routed to experts, which every layer has in place of its MLP. Each of
        them has a hidden layer of `mlp_dim`. They must be dropless. None for MLPs.
      biases: which layers have a bias: 'qkv', 'out' (of attention), 'mlp', 'norm'.
      norm: 'rms' (RMSNorm) or 'layer' (LayerNorm).
      norm_epsilon: what a norm adds to the variance.
      norm_scale_offset: whether the scale of a norm is stored as its difference from 1.
      post_norms: whether the outputs of attention and MLP are normed too.
      qk_norm: whether each head of queries and keys is normed, before rotary positions.
      positions: 'rotary', or 'learned' for a table that is added to the embeddings.
      max_positions: the size of the table of learned positions.
      rope_max_wavelength: the longest wavelength of the rotary positions, in positions.
      rope_scaling: longer wavelengths for long contexts.
      local_rope_max_wavelength: the longest wavelength in local layers, without scaling. By
        default, local layers use the same wavelengths as global layers.
      window: the number of positions that a token sees in local layers, with its own. None makes
        all layers global.
      global_every: every n-th layer is global, and the others are local. 0 makes all layers local.
      attention: how attention is computed, which does not change the model.
      attention_scale: the factor of the products of queries and keys, by default head_dim ** -0.5.
      attention_soft_cap: bounds the products by soft_cap * tanh(product / soft_cap).
      logit_soft_cap: bounds the logits in the same way.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    dropout_rate: float = 0.0
    dtype: DType = 'float32'
    param_dtype: DType = 'float32'
    gradient_dtype: DType | None = None
    products: QuantizedProducts | None = None
    remat: RematWord | Remat | Sequence[RematWord | Remat] = 'none'
    scan_layers: bool = True
    scan_unroll: int | None = None
    pipeline: Pipeline | None = None
    scale_embeddings: bool = True
    tie_embeddings: bool = False
    activation: Activation = 'silu'
    gated_mlp: bool = True
    experts: ExpertsConfig | None = None
    biases: Sequence[Bias] = ()
    norm: Literal['rms', 'layer'] = 'rms'
    norm_epsilon: float = 1e-6
    norm_scale_offset: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    positions: Literal['rotary', 'learned'] = 'rotary'
    max_positions: int = 0
    rope_max_wavelength: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_max_wavelength: float | None = None
    window: int | None = None
    global_every: int = 0
    attention: AttentionSettings = dataclasses.field(default_factory=AttentionSettings)
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        intervals = {'dropout_rate': '[0, 1)'}
        intervals |= dict.fromkeys(('max_positions', 'global_every'), '[0, inf)')
        check_fields(TransformerConfig, self, 'TransformerConfig.', **intervals)
        known, biases = get_args(Bias), self.biases
        if not isinstance(biases, list | tuple) or not all(bias in known for bias in biases):
            raise ConfigError(f'biases is {biases!r}: use a tuple of {", ".join(map(repr, known))}')
        object.__setattr__(self, 'biases', tuple(biases))  # models are hashed
        if isinstance(self.remat, list):
            object.__setattr__(self, 'remat', tuple(self.remat))
        missing = {} if self.gated_mlp else {'mlp_gate': 'gated_mlp is False'}
        check_placed('remat', self.remats, missing)
        for problem in (*self._problems(), *self._problems_of_experts()):
            raise ConfigError(problem)

    def _problems(self) -> Iterator[str]:
        """Yields what is wrong with settings that exclude each other."""
        heads, kv_heads, rotary = self.num_heads, self.num_kv_heads, self.positions == 'rotary'
        local_rope = self.local_rope_max_wavelength
        if self.vocab_size >= 2**31:
            yield f'vocab_size is {self.vocab_size:,}: tokens are int32, so it must be below 2**31'
        if heads % kv_heads:
            yield f'num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})'
        kept, unrolled, layers = len(self.remats), self.layers_per_iteration, self.num_layers
        if isinstance(self.remat, tuple) and 'auto' in self.remat:
            yield f"remat is {self.remat!r}: use remat = 'auto', which chooses for all layers"
        if self.scan_unroll is not None and not self.scan_layers:
            yield f'scan_unroll is {self.scan_unroll}, but scan_layers is False: remove it'
        if self.scan_layers and (layers % unrolled or unrolled % kept):
            yield (
                f'scan_unroll is {unrolled}: it must divide num_layers ({layers}), and be a '
                f'multiple of the {kept} entries of remat'
            )
        if rotary and self.head_dim % 2:
            yield f'head_dim ({self.head_dim}) must be even for rotary positions'
        if rotary != (self.max_positions == 0):
            yield (
                f'positions is {self.positions!r} and max_positions is {self.max_positions}: '
                "max_positions is the size of the table of 'learned' positions, and 0 for 'rotary'"
            )
        if self.pipeline and not self.scan_layers:
            yield 'pipeline runs scanned layers: set scan_layers = True'
        if self.pipeline and self.pipeline.repeats > 1 and {*self.remats} != {self.remats[0] or 0}:
            yield (
                f'pipeline has {self.pipeline.repeats} repeats and remat is {self.remat!r}: use '
                "one entry other than 'none', or the weights of every repeat would be kept"
            )
        if not rotary and (self.rope_scaling or local_rope):
            yield "positions is 'learned': remove rope_scaling and local_rope_max_wavelength"
        if self.window is None and (self.global_every or local_rope):
            yield (
                f'global_every is {self.global_every} and local_rope_max_wavelength is '
                f'{local_rope}, but no layer is local: set window, or remove them'
            )
        if self.norm == 'rms' and 'norm' in self.biases:
            yield "biases has 'norm', but norm is 'rms', which has no bias: use norm = 'layer'"

    def _problems_of_experts(self) -> Iterator[str]:
        """Yields what is wrong with settings of experts, and with others next to them."""
        experts, summed = self.experts, self.gradient_dtype
        if experts is None:
            return
        if not experts.dropless:
            yield 'experts that drop tokens are for T5 only: set ExpertsConfig.dropless = True'
        unused = {'mlp_dim': None, 'dropout_rate': None, 'jitter_noise': 0.0}
        for name, default in (unused | {'encoder_every': 1, 'decoder_every': 1}).items():
            if (value := getattr(experts, name)) != default:
                yield (
                    f'ExpertsConfig.{name} is {value!r}, which is a setting of T5: remove it; all '
                    'layers have experts, of the sizes of TransformerConfig'
                )
        if self.pipeline:
            yield 'layers with experts cannot run in a pipeline: remove experts or pipeline'
        if self.products:
            yield 'experts cannot multiply in 8 bits: remove products or experts'
        if 'mlp' in self.biases:
            yield "biases has 'mlp', but experts have no biases: remove 'mlp'"
        if summed not in (None, self.dtype):
            yield (
                f'gradient_dtype is {summed!r}, but the gradients of experts are summed in dtype, '
                f'{self.dtype!r}: remove gradient_dtype, or use {self.dtype!r}'
            )

    @property
    def remats(self) -> tuple[Remat | None, ...]:
        """What the layers keep for the backward pass; see `list_remats`."""
        return list_remats('remat', self.remat)

    @property
    def layers_per_iteration(self) -> int:
        """The number of layers in one iteration of the compiled loop over scanned layers."""
        return len(self.remats) if self.scan_unroll is None else self.scan_unroll

    @property
    def kv_heads_axis(self) -> str:
        """The logical axis of key and value heads: 'heads' if each query head has its own.

        T5X's rules have no 'kv_heads', so they cover only models whose heads are not shared.
        """
        return 'heads' if self.num_kv_heads == self.num_heads else 'kv_heads'

    def is_local(self, layer: Any) -> Any:
        """Returns whether layer number `layer` is local: a bool if no array decides it."""
        if self.window is None or not self.global_every:
            return self.window is not None
        return (layer + 1) % self.global_every != 0
