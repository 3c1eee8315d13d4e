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

from partitioning.rules import free_axes
from train.attention.layout import Layout, device_kind, find_layout, platform
from train.attention.parts import PartSettings
from train.attention.ring import Ring, Zigzag
from train.attention.settings import AttentionSettings, SplashBlocks, default_splash_blocks
from train.attention.sight import Sight
from train.attention.splash_parts import attend_by_splash_parts
from train.errors import ConfigError

LANES = 128


def attend_over_context(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    axes: tuple[str, ...],
    sight: Sight,
    scale: float,
    soft_cap: float | None,
    settings: AttentionSettings,
    attend: Callable[..., jax.Array],
) -> jax.Array:
    """Computes attention on each device for some of the queries of its rows; see `attend`.

    Args:
      q_BLHN: see `attend`.
      k_BSKN: see `attend`.
      v_BSKN: see `attend`.
      axes: what `length_axes` returns.
      sight: see `attend`.
      scale: see `attend`.
      soft_cap: see `attend`.
      settings: see `attend`.
      attend: the function `attend`, for the queries of one device.

    Raises:
      ConfigError: if queries and keys are not the same tokens, or their number does not divide.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    zigzag = Zigzag(axes, math.prod(sizes[axis] for axis in axes))
    layout = _find_layout(q_BLHN, k_BSKN, axes, zigzag.devices, sight)
    length, group = q_BLHN.shape[1], q_BLHN.shape[2] // k_BSKN.shape[2]
    half = length // (2 * zigzag.devices)
    if layout.repeats > 1:
        k_BSKN, v_BSKN = (x.repeat(layout.repeats, axis=2) for x in (k_BSKN, v_BSKN))
    blocks = _choose_blocks(settings, zigzag.devices, half)

    def attend_half(q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, seen: Sight) -> jax.Array:
        arrays = (q_BLHN, k_BSKN, v_BSKN)
        if blocks is not None:
            return attend_by_splash_parts(arrays[0] * scale, *arrays[1:], seen, soft_cap, blocks)
        return attend(*arrays, sight=seen, scale=scale, soft_cap=soft_cap, settings=settings)

    def body(q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, segments_BS: Any, local: Any) -> jax.Array:
        heads, local = q_BLHN.shape[2], sight.local if local is None else local
        k_BSKN, v_BSKN = (layout.own_heads(x, heads, group) for x in (k_BSKN, v_BSKN))
        if settings.context == 'ring':
            part = PartSettings(scale=scale, soft_cap=soft_cap, blocks=blocks)
            ring = Ring(
                zigzag=zigzag, half=half, causal=sight.causal, window=sight.window, part=part
            )
            return ring.attend(q_BLHN, k_BSKN, v_BSKN, segments_BS, local)
        keys = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (k_BSKN, v_BSKN))
        k_BSKN, v_BSKN = keys
        halves = []
        for number, half_BLHN in zip(zigzag.numbers(), zigzag.spread(q_BLHN), strict=True):
            seen = _sight_of_half(sight, number, half, segments_BS, local)
            halves.append(attend_half(half_BLHN, k_BSKN, v_BSKN, seen))
        return zigzag.collect(*halves)

    traced = sight.window is not None and not isinstance(sight.local, bool)
    arguments = (q_BLHN, k_BSKN, v_BSKN, sight.segments_BL, sight.local if traced else None)
    return jax.shard_map(
        body,
        in_specs=(
            layout.queries,
            layout.keys,
            layout.keys,
            PartitionSpec(layout.queries[0]),
            PartitionSpec(),
        ),
        out_specs=layout.queries,
        axis_names={*free_axes(jax.sharding.get_abstract_mesh())},
        check_vma=False,  # the kernels do not say over which axes their results vary
    )(*arguments)


def _choose_blocks(settings: AttentionSettings, devices: int, half: int) -> SplashBlocks | None:
    """The blocks of the kernel for TPUs, or None if another kind computes each half.

    Raises:
      ConfigError: if the settings require the kernel, which cannot compute halves of this length.
    """
    if settings.kind == 'splash' and half % LANES:
        raise ConfigError(
            f"AttentionSettings.kind is 'splash', but each of {devices} devices has two halves of "
            f'{half} positions, which is not a multiple of {LANES}: use rows of another length, or '
            "kind 'auto' or 'dot'"
        )
    by_splash = settings.kind == 'splash' or (settings.kind == 'auto' and platform() == 'tpu')
    if not by_splash or half % LANES:
        return None
    return settings.splash_blocks or default_splash_blocks(device_kind())


def _sight_of_half(
    sight: Sight, number: Any, half: int, segments_BS: jax.Array | None, local: Any
) -> Sight:
    """What half number `number` of the queries sees of all keys of a row."""
    first, segments_BL = number * half, None
    if segments_BS is not None:
        segments_BL = jax.lax.dynamic_slice_in_dim(segments_BS, first, half, axis=1)
    return dataclasses.replace(
        sight,
        first=first,
        local=local,
        segments_BL=segments_BL,
        key_segments_BS=segments_BS,
    )


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
