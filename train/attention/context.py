"""Attention over rows whose length is divided over devices (context parallelism).

The rules divide the length of the activations, for example by `('length', 'context')`. Everything
in a layer except attention then works on each device's own tokens. Here the queries are exchanged,
see `ring`, and the keys and values of a row are gathered: if several heads share one kv_head,
they are smaller than the queries, and their gradients are scattered in the backward pass.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim. Inside the shard_map, L is the length of a device, and S the length of the row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from train.attention.layout import Layout, attend_on_each_device, find_layout, platform
from train.attention.parts import attend_by_splash_parts
from train.attention.ring import Ring, Zigzag
from train.attention.settings import AttentionSettings
from train.attention.sight import Sight
from train.attention.splash import LANES, choose_blocks
from train.errors import ConfigError


def attend_over_context(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    axes: tuple[str, ...],
    sight: Sight,
    settings: AttentionSettings,
    attend: Callable[..., jax.Array],
) -> jax.Array:
    """Computes attention on each device for some of the queries of its rows; see `attend`.

    `axes` is what `length_axes` returns. `attend` is the function of this name, which computes the
    attention of the queries of one device. Raises a ConfigError if queries and keys are not the
    same tokens, if their number does not divide, or if the settings require the kernel for TPUs,
    which cannot compute halves of this length.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    zigzag = Zigzag(axes, math.prod(sizes[axis] for axis in axes))
    layout = _find_layout(q_BLHN, k_BSKN, axes, zigzag.devices, sight)
    half = q_BLHN.shape[1] // (2 * zigzag.devices)
    if settings.kind == 'splash' and half % LANES:
        raise ConfigError(
            f"AttentionSettings.kind is 'splash', but each of {zigzag.devices} devices has two "
            f'halves of {half} positions, which is not a multiple of {LANES}: use rows of another '
            "length, or kind 'auto' or 'dot'"
        )
    by_splash = settings.kind == 'splash' or (settings.kind == 'auto' and platform() == 'tpu')
    blocks = choose_blocks(settings) if by_splash and not half % LANES else None

    def body(q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, sight: Sight) -> jax.Array:
        segments_BS, local = sight.segments_BL, sight.local
        if settings.context == 'ring':
            ring = Ring(zigzag=zigzag, half=half, whole=sight.without_arrays(), blocks=blocks)
            return ring.attend(q_BLHN, k_BSKN, v_BSKN, segments_BS, local)
        keys = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (k_BSKN, v_BSKN))
        k_BSKN, v_BSKN = keys
        halves = []
        for number, half_BLHN in zip(zigzag.numbers(), zigzag.spread(q_BLHN), strict=True):
            first, segments_BL = number * half, None
            if segments_BS is not None:
                segments_BL = jax.lax.dynamic_slice_in_dim(segments_BS, first, half, axis=1)
            seen = dataclasses.replace(
                sight, first=first, segments_BL=segments_BL, key_segments_BS=segments_BS
            )
            arrays = half_BLHN, k_BSKN, v_BSKN
            if blocks is None:
                halves.append(attend(*arrays, sight=seen, settings=settings))
            else:
                halves.append(attend_by_splash_parts(*arrays, seen, blocks))
        return zigzag.collect(*halves)

    return attend_on_each_device(body, layout, q_BLHN, k_BSKN, v_BSKN, sight)


def _find_layout(
    q_BLHN: jax.Array, k_BSKN: jax.Array, axes: tuple[str, ...], devices: int, sight: Sight
) -> Layout:
    """The layout of rows and heads as without context parallelism, with the length over `axes`."""
    length, slots, over = q_BLHN.shape[1], k_BSKN.shape[1], ' and '.join(map(repr, axes))
    if length != slots or not isinstance(sight.first, int) or sight.first:
        raise ConfigError(
            f'there are {length} queries and {slots} keys, and the rules divide the length over '
            f"{over}: only attention of a row to itself can be divided. Set ('length', None)"
        )
    if length % (2 * devices):
        raise ConfigError(
            f'rows of {length} tokens are divided over the {devices} devices of {over}, so their '
            f'length must be a multiple of {2 * devices}: each device takes two halves of a part'
        )
    layout = find_layout(q_BLHN.shape, k_BSKN.shape)
    if layout is None:
        raise ConfigError(
            f'the rules divide the length over {over} and pad the rows or heads (on_indivisible '
            "is 'pad'): use sizes that the mesh divides"
        )
    specs = (PartitionSpec(spec[0], axes, spec[2], None) for spec in (layout.queries, layout.keys))
    queries, keys = specs
    return layout._replace(queries=queries, keys=keys)
