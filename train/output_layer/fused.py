"""The scores of targets and their gradients, from logits or from the hidden states before them.

If a model hands over its hidden states, whole logits never exist. The weights are gathered once,
over the axes that shard their rows, and kept for the backward pass. Their gradient is reduced and
scattered chunk by chunk, and the gradient of the hidden states once, after all chunks.

Suffixes of array names: B batch, L length, D embed, V vocab.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning import constrain
from partitioning.constraints import lay_out
from partitioning.products import scatter_sum, sum_over
from partitioning.rules import free_axes
from train.errors import ConfigError
from train.output_layer.chunks import (
    Chunking,
    Cotangents,
    Partial,
    choose_chunks,
    differentiate_chunks,
    score_chunks,
)
from train.output_layer.logits import DeferredLogits, OutputSettings, TargetScores, score_logits
from train.output_layer.placement import (
    Placement,
    find_placement,
    gather,
    index_along,
    take_part,
)


class _Kept(NamedTuple):
    """What the backward pass needs: arrays of the tokens and columns of a device, or their specs.

    `logits_BLV` is None if there are several chunks.
    """

    x_BLD: Any
    w_DV: Any
    targets_BL: Any
    log_z_BL: Any
    logits_BLV: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """What is known of an output layer when it is traced.

    `x_dtype` is the dtype of the hidden states.
    """

    placement: Placement
    chunking: Chunking
    x_dtype: Any
    w_dtype: Any

    @property
    def token_spec(self) -> PartitionSpec:
        """The spec of arrays [batch, length]."""
        return self.placement.spec(self.placement.batch, self.placement.length)

    @property
    def own_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """The specs of hidden states and weights."""
        p = self.placement
        return p.spec(p.batch, p.length, p.hidden), p.spec(p.embed, p.vocab)

    @property
    def kept_specs(self) -> _Kept:
        """The specs of what the backward pass needs."""
        p = self.placement
        length = tuple(axis for axis in p.length if axis not in p.vocab)
        token = p.spec(p.batch, length)
        logits = p.spec(p.batch, length, p.vocab) if self.chunking.num_chunks == 1 else None
        return _Kept(p.spec(p.batch, length, ()), p.spec((), p.vocab), token, token, logits)


def score_deferred(
    deferred: DeferredLogits, targets_BL: jax.Array, settings: OutputSettings
) -> TargetScores:
    """Scores int targets [batch, length]. The scores are laid out as ('batch', 'length').

    Raises a ConfigError if a device has fewer columns of the vocabulary than there are chunks, and
    a ValueError if `partitioning.constrain` raises it for the hidden states or the weights.
    """
    x_BLD, w_DV = deferred.x_BLD, deferred.w_DV
    placement = find_placement(x_BLD.shape, deferred.names, w_DV.shape)
    vocab_size = w_DV.shape[1]
    columns = -(-vocab_size // placement.vocab_shards)
    padding = columns * placement.vocab_shards - vocab_size
    tokens = x_BLD.shape[0] * x_BLD.shape[1]
    if placement.tokens:
        sizes = jax.sharding.get_abstract_mesh().shape
        tokens //= math.prod(sizes[axis] for axis in placement.tokens)
    num_chunks, size = choose_chunks(tokens, columns, settings.num_chunks)
    dtype = jnp.dtype(deferred.dtype)
    chunking = Chunking(
        num_chunks=num_chunks,
        size=size,
        vocab_size=vocab_size,
        is_padded=padding > 0,
        dtype=dtype,
        logits_dtype=jnp.dtype(settings.logits_dtype),
        gradient_dtype=jnp.dtype(settings.gradient_dtype or dtype),
        divisor=deferred.divisor,
        soft_cap=deferred.soft_cap,
    )
    if padding:
        w_DV = jnp.pad(w_DV, ((0, 0), (0, padding)))
    layer = _Layer(placement=placement, chunking=chunking, x_dtype=x_BLD.dtype, w_dtype=w_DV.dtype)
    scores = _score(layer, x_BLD, w_DV, targets_BL)
    return TargetScores(*(constrain(each, ('batch', 'length')) for each in scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(layer: _Layer, x_BLD: jax.Array, w_DV: jax.Array, targets_BL: jax.Array) -> TargetScores:
    return _forward(layer, x_BLD, w_DV, targets_BL)[0]


def _forward(
    layer: _Layer, x_BLD: jax.Array, w_DV: jax.Array, targets_BL: jax.Array
) -> tuple[TargetScores, Any]:
    p, c = layer.placement, layer.chunking

    def on_device(x_BLD: Any, w_DV: Any, targets_BL: Any) -> tuple[TargetScores, _Kept]:
        x_BLD = gather(gather(x_BLD, p.hidden, 2), p.shared_length, 1).astype(c.dtype)
        w_DV = gather(w_DV, p.embed, 0)
        targets_BL = gather(targets_BL, p.shared_length, 1)
        first_token = index_along(p.vocab) * w_DV.shape[1]
        partial, logits_BLV = score_chunks(c, x_BLD, w_DV, targets_BL, first_token)
        scores = _join(p, partial)
        kept = _Kept(x_BLD, w_DV, targets_BL, scores.log_z_BL, logits_BLV)
        return TargetScores(*(take_part(each, p.shared_length, 1) for each in scores)), kept

    in_specs = (*layer.own_specs, layer.token_spec)
    arguments = [x_BLD, w_DV.astype(c.dtype), targets_BL]  # cast before they are gathered
    if p.sharded:
        arguments = [lay_out(x, spec) for x, spec in zip(arguments, in_specs, strict=True)]
    return _run(p, on_device, arguments, in_specs, (layer.token_spec, layer.kept_specs))


def _backward(
    layer: _Layer, kept: _Kept, cotangents: TargetScores
) -> tuple[jax.Array, jax.Array, None]:
    p, c = layer.placement, layer.chunking

    def on_device(kept: _Kept, cotangents: Cotangents) -> tuple[jax.Array, jax.Array]:
        dx_BLD, dw_DV = differentiate_chunks(
            c,
            *kept,
            Cotangents(*(gather(each, p.shared_length, 1) for each in cotangents)),
            index_along(p.vocab) * kept.w_DV.shape[1],
            lambda dw_DC: scatter_sum(dw_DC, p.embed, 0),
        )
        dw_DV = sum_over(dw_DV, tuple(axis for axis in p.tokens if axis not in p.embed))
        dx_BLD = dx_BLD.astype(c.gradient_dtype)
        dx_BLD = scatter_sum(scatter_sum(dx_BLD, p.shared_length, 1), p.hidden, 2)
        scattered = {*p.shared_length, *p.hidden}
        dx_BLD = sum_over(dx_BLD, tuple(axis for axis in p.vocab if axis not in scattered))
        return dx_BLD.astype(layer.x_dtype), dw_DV.astype(layer.w_dtype)

    in_specs = layer.kept_specs, layer.token_spec
    arguments = kept, Cotangents(*cotangents[:3])
    return *_run(p, on_device, arguments, in_specs, layer.own_specs), None


_score.defvjp(_forward, _backward)


def _join(p: Placement, partial: Partial) -> TargetScores:
    """Joins the scores of the parts of the vocabulary."""
    if not p.vocab:
        log_z_BL = partial.greatest_BL + jnp.log(partial.exp_sum_BL)
        return TargetScores(log_z_BL, partial.logit_BL, partial.logit_sum_BL, partial.argmax_BL)
    greatest_BL = jax.lax.pmax(partial.greatest_BL, p.vocab)
    exp_sum_BL = partial.exp_sum_BL * jnp.exp(partial.greatest_BL - greatest_BL)
    sums = jnp.stack([exp_sum_BL, partial.logit_BL, partial.logit_sum_BL])
    exp_sum_BL, logit_BL, logit_sum_BL = jax.lax.psum(sums, p.vocab)
    # Of equal logits, the first one counts.
    is_greatest_BL = partial.greatest_BL == greatest_BL
    last = jnp.iinfo(jnp.int32).max
    argmax_BL = jax.lax.pmin(jnp.where(is_greatest_BL, partial.argmax_BL, last), p.vocab)
    return TargetScores(greatest_BL + jnp.log(exp_sum_BL), logit_BL, logit_sum_BL, argmax_BL)


def _run(
    p: Placement, function: Callable[..., Any], arguments: Any, in_specs: Any, out_specs: Any
) -> Any:
    """Calls a function of the shards of a device on each device."""
    if not p.sharded:
        return function(*arguments)
    mesh = jax.sharding.get_abstract_mesh()
    on_devices = jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*free_axes(mesh)},
        check_vma=False,
    )
    return on_devices(*arguments)


def score_targets(
    outputs: jax.Array | DeferredLogits, targets_BL: jax.Array, settings: OutputSettings
) -> TargetScores:
    """Scores targets, without whole logits if the model has deferred them.

    Args:
      outputs: the logits, [batch, length, vocab], or what computes them.
      targets_BL: int targets, [batch, length].
      settings: how deferred logits are computed.

    Raises:
      ConfigError: if the logits are not deferred, and the settings are not the defaults.
    """
    if isinstance(outputs, DeferredLogits):
        return score_deferred(outputs, targets_BL, settings)
    if settings != OutputSettings():
        raise ConfigError(
            f'{settings} needs a model that hands over its hidden states, but this one returns '
            'logits: remove the settings, or give its __call__ an argument defer_logits with which '
            'it returns train.output_layer.DeferredLogits'
        )
    return score_logits(outputs, targets_BL)
