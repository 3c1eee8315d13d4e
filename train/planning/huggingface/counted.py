"""Models of Hugging Face that are counted, because the models here have no such layers.

Latent attention, experts that all tokens share, and state-space layers: of these, the parameters,
the FLOPs and about the memory of a device are known, and no time and no gin file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from meshwright.report.forecasts import is_close
from train.checkpoints.huggingface.config_json import ConfigJson
from train.errors import ConfigError
from train.planning.candidates import bytes_of_parameters
from train.planning.machines import Machine

# The memory of a device that these formulas miss or count in excess, as a share.
ERROR = 0.3
_ELEMENT, _SCORE = 2, 4  # bytes of an activation in bfloat16, and of a logit in float32
_CHUNKS = 8  # of the vocabulary, of which logits exist at a time
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model whose matrices are counted.

    Attributes:
      kind: its `model_type`.
      has: the layers that the models here do not have, for people.
      num_layers, width, vocab: its sizes.
      max_length: the longest text that it was made for, in tokens, or None.
      active_parameters: those that a token is multiplied by, with the output layer.
      gathered: the parameters of its largest layer, without experts that tokens choose.
      widest: the elements of a token inside of a layer at a time.
      attention: the FLOPs of the forward pass for each pair of tokens, in all layers.
      recurrence: the FLOPs of the forward pass for each token besides products, in all layers.
    """

    kind: str
    has: str
    num_layers: int
    width: int
    vocab: int
    max_length: int | None
    num_parameters: int
    active_parameters: int
    gathered: int
    widest: int
    attention: float = 0.0
    recurrence: float = 0.0

    def flops_per_token(self, length: int) -> float:
        """The FLOPs of forward and backward pass per token, in causal rows of some length."""
        forward = 2 * self.active_parameters + self.attention * length / 2 + self.recurrence
        return 3 * forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedFit:
    """About how a counted model does on a machine, with parameters over all devices.

    Attributes:
      peak: the memory of a device in bytes, by formula, with an error of `ERROR`.
      verdict: 'yes', 'no', or 'close' if the error decides.
      flops: the FLOPs of a device in a step, without recomputation.
    """

    machine: Machine
    num_microbatches: int
    peak: float
    verdict: str
    flops: float


def fit_counted(model: CountedModel, machine: Machine, rows: int, length: int) -> CountedFit:
    """Estimates the memory of a device, with the fewest microbatches that fit, if any do."""
    limit, devices = machine.chip.hbm_bytes_per_device, machine.num_devices
    possible = [n for n in _MICROBATCHES if rows % n == 0 and (n == 1 or rows // n >= devices)]
    peaks = {n: _peak(model, devices, n, rows * length) for n in possible}
    number = next((n for n, peak in peaks.items() if peak * (1 + ERROR) <= limit), possible[-1])
    peak = peaks[number]
    flops = model.flops_per_token(length) * rows * length / devices
    return CountedFit(
        machine=machine,
        num_microbatches=number,
        peak=peak,
        verdict=judge(peak, limit, ERROR),
        flops=flops,
    )


def judge(peak: float, limit: float, error: float) -> str:
    """Whether a peak by formula fits: 'yes', 'no', or 'close' if its error decides."""
    if is_close(peak, limit, error):
        return 'close'
    return 'yes' if peak <= limit else 'no'


def _peak(model: CountedModel, devices: int, num_microbatches: int, batch_tokens: int) -> float:
    """The state, the input of each layer, one layer at work with its weights, and its logits."""
    tokens = batch_tokens / devices / num_microbatches
    state = bytes_of_parameters(num_microbatches) * model.num_parameters / devices
    inputs = _ELEMENT * model.num_layers * tokens * model.width
    at_work = _ELEMENT * (2 * tokens * model.widest + 2 * model.gathered)
    return state + inputs + at_work + _SCORE * tokens * model.vocab / _CHUNKS


def count_model(config: ConfigJson) -> CountedModel | None:
    """Counts a model, or returns None if its `model_type` is not one of `COUNTED`.

    Raises a ConfigError if a setting is missing or malformed.
    """
    text = config.get('text_config')
    if isinstance(text, dict):  # of a model of texts and images
        config = ConfigJson(text, config.where)
    kind = config.get('model_type')
    if not isinstance(kind, str) or kind not in COUNTED:
        return None
    try:
        found = COUNTED[kind](config)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f'{config.where} is malformed: {error!r}') from error
    if min(found.num_parameters, found.active_parameters, found.num_layers) < 1:
        raise ConfigError(f'{config.where} is malformed: its sizes must be 1 or more')
    return found


def _embeddings(c: ConfigJson, *, tied: bool) -> tuple[int, int]:
    """The parameters of the embedding and the output layer together, and of the output layer."""
    one = c.need('vocab_size') * c.need('hidden_size')
    return (one if c.get('tie_word_embeddings', tied) else 2 * one), one


def _sizes(c: ConfigJson) -> tuple[int, int, int]:
    """The width, the number of layers, and the number of heads of each."""
    return c.need('hidden_size'), c.need('num_hidden_layers'), c.need('num_attention_heads')


def _counted(c: ConfigJson, has: str, **counts: Any) -> CountedModel:
    """A model with the sizes that every file has, and what was counted."""
    return CountedModel(
        kind=c.need('model_type'),
        has=has,
        num_layers=c.need('num_hidden_layers'),
        width=c.need('hidden_size'),
        vocab=c.need('vocab_size'),
        max_length=c.get('max_position_embeddings'),
        **counts,
    )


def _latent(c: ConfigJson) -> CountedModel:
    """DeepSeek V2 and V3: latent attention, first dense layers, then experts and shared ones."""
    d, layers, heads = _sizes(c)
    query = c.need('qk_nope_head_dim') + c.need('qk_rope_head_dim')
    value, latent, rank = c.need('v_head_dim'), c.need('kv_lora_rank'), c.get('q_lora_rank') or 0
    matrices = d * rank + rank * heads * query if rank else d * heads * query
    matrices += d * (latent + c.need('qk_rope_head_dim')) + heads * value * d
    matrices += latent * heads * (c.need('qk_nope_head_dim') + value)
    attention = matrices + rank + latent
    routed, chosen, shared = (
        c.need(key) for key in ('n_routed_experts', 'num_experts_per_tok', 'n_shared_experts')
    )
    expert = 3 * d * c.need('moe_intermediate_size')
    dense, router = 3 * d * c.need('intermediate_size'), routed * d
    first = c.get('first_k_dense_replace', 0)
    rest, (embedding, output) = layers - first, _embeddings(c, tied=False)
    bias = routed if c.get('topk_method') == 'noaux_tc' else 0
    always = layers * matrices + first * dense + rest * (router + shared * expert)
    whole = embedding + layers * (attention - matrices + 2 * d) + d + rest * bias + always
    return _counted(
        c,
        'latent attention and experts that all tokens share',
        num_parameters=whole + rest * routed * expert,
        active_parameters=always + rest * chosen * expert + output,
        gathered=attention + max(dense if first else 0, router + shared * expert),
        widest=max(
            heads * (2 * query + value), (chosen + shared) * 3 * c.need('moe_intermediate_size')
        ),
        attention=2.0 * heads * (query + value) * layers,
    )


def _shared(c: ConfigJson) -> CountedModel:
    """Qwen 2 with experts: grouped attention with biases, experts, and one shared expert."""
    c.require('decoder_sparse_step', 1, default=1)
    c.require('mlp_only_layers', [], default=[])
    d, layers, heads = _sizes(c)
    size, groups = c.get('head_dim', d // heads), c.get('num_key_value_heads', heads)
    matrices = 2 * d * heads * size + 2 * d * groups * size
    biases = (heads + 2 * groups) * size
    routed, chosen = c.need('num_experts'), c.need('num_experts_per_tok')
    expert = 3 * d * c.need('moe_intermediate_size')
    shared = 3 * d * c.need('shared_expert_intermediate_size') + d
    router, (embedding, output) = routed * d, _embeddings(c, tied=False)
    always = layers * (matrices + router + shared)
    whole = embedding + layers * (biases + 2 * d) + d + always + layers * routed * expert
    inside = chosen * c.need('moe_intermediate_size') + c.need('shared_expert_intermediate_size')
    return _counted(
        c,
        'an expert that all tokens share',
        num_parameters=whole,
        active_parameters=always + layers * chosen * expert + output,
        gathered=matrices + biases + router + shared,
        widest=max((heads + 2 * groups) * size, 3 * inside),
        attention=4.0 * heads * size * layers,
    )


def _llama4(c: ConfigJson) -> CountedModel:
    """Llama 4: grouped attention; in every layer, or in every second, experts and a shared one."""
    d, layers, heads = _sizes(c)
    size, groups = c.get('head_dim', d // heads), c.get('num_key_value_heads', heads)
    matrices = 2 * d * heads * size + 2 * d * groups * size
    routed, chosen = c.need('num_local_experts'), c.get('num_experts_per_tok', 1)
    expert, dense = 3 * d * c.need('intermediate_size'), 3 * d * c.need('intermediate_size_mlp')
    sparse = layers // c.get('interleave_moe_layer_step', 1)
    router, (embedding, output) = routed * d, _embeddings(c, tied=False)
    always = layers * matrices + sparse * (router + expert) + (layers - sparse) * dense
    inside = max((chosen + 1) * c.need('intermediate_size'), c.need('intermediate_size_mlp'))
    return _counted(
        c,
        'an expert that all tokens share',
        num_parameters=embedding + layers * 2 * d + d + always + sparse * routed * expert,
        active_parameters=always + sparse * chosen * expert + output,
        gathered=matrices + max(router + expert, dense if sparse < layers else 0),
        widest=max((heads + 2 * groups) * size, 3 * inside),
        attention=4.0 * heads * size * layers,
    )


def _mamba(c: ConfigJson) -> CountedModel:
    """Mamba: a projection, a short convolution, and a recurrence with its own parameters."""
    d, layers, state = c.need('hidden_size'), c.need('num_hidden_layers'), c.get('state_size', 16)
    inner = c.get('intermediate_size') or c.get('expand', 2) * d
    rank, kernel = c.get('time_step_rank', 'auto'), c.get('conv_kernel', 4)
    rank = -(-d // 16) if rank == 'auto' else rank
    matrices = 3 * d * inner + inner * (rank + 2 * state) + rank * inner
    others = inner * kernel + (inner if c.get('use_conv_bias', True) else 0) + 2 * inner
    return _with_states(c, layers, d, inner, state, matrices, others + inner * state + d)


def _mamba2(c: ConfigJson) -> CountedModel:
    """Mamba 2: as Mamba, with heads and one projection for everything."""
    d, layers, state = c.need('hidden_size'), c.need('num_hidden_layers'), c.get('state_size', 128)
    inner, groups = c.get('expand', 2) * d, c.get('n_groups', 8)
    heads, kernel = c.get('num_heads', 128), c.get('conv_kernel', 4)
    mixed = inner + 2 * groups * state
    matrices = d * (inner + mixed + heads) + inner * d
    others = mixed * kernel + (mixed if c.get('use_conv_bias', True) else 0) + 3 * heads + inner + d
    return _with_states(c, layers, d, inner, state, matrices, others)


def _with_states(
    c: ConfigJson, layers: int, d: int, inner: int, state: int, matrices: int, others: int
) -> CountedModel:
    embedding, output = _embeddings(c, tied=True)
    return _counted(
        c,
        'state-space layers',
        num_parameters=embedding + layers * (matrices + others) + d,
        active_parameters=layers * matrices + output,
        gathered=matrices + others,
        widest=5 * inner,
        recurrence=6.0 * inner * state * layers,
    )


COUNTED: dict[str, Callable[[ConfigJson], CountedModel]] = {
    'deepseek_v2': _latent,
    'deepseek_v3': _latent,
    'falcon_mamba': _mamba,
    'kimi_k2': _latent,
    'llama4_text': _llama4,
    'mamba': _mamba,
    'mamba2': _mamba2,
    'qwen2_moe': _shared,
}
