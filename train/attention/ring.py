"""Attention over rows whose length is divided over devices (context parallelism).

The rules divide the length of the activations, for example by `('length', 'context')`. Everything
in a layer except attention then works on each device's own tokens. The queries are exchanged, and
keys and values either are gathered or travel around a ring. If several heads share one kv_head,
they are smaller than the queries, and their gradients are scattered in the backward pass.

Under a causal mask, late queries see more keys than early ones. The devices that share a row have
contiguous parts of it, so the last device would work longest, and all others would wait for it.
Therefore the parts are cut into halves. Of n devices, device i takes half i and half 2n - 1 - i of
the row, one early and one late: together they see the same number of keys on every device.

At each step of a ring, a device computes the attention of its queries over the keys that it holds,
adds it to the sums of the earlier steps, and passes the keys on while it computes. In the backward
pass the keys travel once more, together with their gradients.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim. In the shard_map of gathered keys, L is the length of a device, and S of the row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from train.attention.blockwise import LOWEST
from train.attention.layout import Layout, attend_on_each_device, find_layout, platform
from train.attention.parts import add_parts, attend_by_splash_parts, attend_part, part_gradients
from train.attention.sight import AttentionSettings, Sight, SplashBlocks
from train.attention.splash import LANES, choose_blocks
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """Moves halves of the parts of a row between the devices along mesh axes, in a shard_map."""

    axes: tuple[str, ...]
    devices: int

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of the early and the late half of this device, scalars."""
        device = jax.lax.axis_index(self.axes)
        return device, 2 * self.devices - 1 - device

    def spread(self, x_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the early and the late half of this device, for the contiguous part that it has.

        Raises a ValueError if the length is odd.
        """
        even, odd = (
            jax.lax.ppermute(half, self.axes, self._moves(parity))
            for parity, half in enumerate(jnp.split(x_BL, 2, axis=1))
        )
        # Of half i and half 2n - 1 - i, one has an even number.
        is_even = jax.lax.axis_index(self.axes) % 2 == 0
        return jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)

    def collect(self, early_BL: jax.Array, late_BL: jax.Array) -> jax.Array:
        """Returns the contiguous part of this device: the inverse of `spread`."""
        is_even = jax.lax.axis_index(self.axes) % 2 == 0
        halves = (
            jnp.where(is_even, early_BL, late_BL),
            jnp.where(is_even, late_BL, early_BL),
        )
        moved = (
            jax.lax.ppermute(half, self.axes, [(to, at) for at, to in self._moves(parity)])
            for parity, half in enumerate(halves)
        )
        return jnp.concatenate([*moved], axis=1)

    def _moves(self, parity: int) -> list[tuple[int, int]]:
        """Pairs of devices: the contiguous and the final place of even or odd halves."""
        numbers = range(parity, 2 * self.devices, 2)
        return [(n // 2, min(n, 2 * self.devices - 1 - n)) for n in numbers]


Halves = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The attention of the devices along mesh axes, inside a shard_map.

    Attributes:
      zigzag: which halves of a row each device has.
      half: the length of a half.
      whole: what a query sees of its row, without arrays.
      blocks: the block sizes of splash kernels, or None for all scores of two halves at once.
    """

    zigzag: Zigzag
    half: int
    whole: Sight
    blocks: SplashBlocks | None

    def attend(
        self,
        q_BLHN: jax.Array,
        k_BLKN: jax.Array,
        v_BLKN: jax.Array,
        segments_BS: jax.Array | None,
        local: jax.Array | bool,
    ) -> jax.Array:
        """Computes the attention of the queries of a device over its rows.

        The device has contiguous parts of queries, keys and values, but the segments of whole rows.
        """
        halves = (self.zigzag.spread(x) for x in (q_BLHN, k_BLKN, v_BLKN))
        local = jnp.asarray(local)
        return self.zigzag.collect(*_attend(self, *halves, segments_BS, local))

    def sight(self, query: Any, key: Any, segments_BS: jax.Array | None, local: Any) -> Sight:
        """What half number `query` sees of half number `key`."""

        def of_half(number: Any) -> jax.Array | None:
            if segments_BS is None:
                return None
            return jax.lax.dynamic_slice_in_dim(segments_BS, number * self.half, self.half, axis=1)

        return dataclasses.replace(
            self.whole,
            first=(query - key) * self.half,
            local=local,
            segments_BL=of_half(query),
            key_segments_BS=of_half(key),
        )

    def is_seen(self, query: Any, key: Any, local: Any) -> Any:
        """Whether any query of half number `query` sees any key of half number `key`."""
        first, sight = (query - key) * self.half, dataclasses.replace(self.whole, local=local)
        return sight.sees_any(first - (self.half - 1), first + (self.half - 1))

    def key_numbers(self, step: Any) -> tuple[Any, Any]:
        """The numbers of the halves whose keys a device holds at a step."""
        device = jax.lax.axis_index(self.zigzag.axes)
        owner = (device - step) % self.zigzag.devices
        return owner, 2 * self.zigzag.devices - 1 - owner

    def pass_on(self, x: Any) -> Any:
        """Sends arrays to the next device."""
        devices = self.zigzag.devices
        to = [(device, (device + 1) % devices) for device in range(devices)]
        return jax.lax.ppermute(x, self.zigzag.axes, to)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, q: Halves, k: Halves, v: Halves, segments_BS: Any, local: Any) -> Halves:
    return _forward(ring, q, k, v, segments_BS, local)[0]


def _forward(
    ring: Ring, q: Halves, k: Halves, v: Halves, segments_BS: Any, local: Any
) -> tuple[Halves, Any]:
    """The attention of both halves, and what the backward pass needs."""

    def add(sums: Any, step: Any, k: Halves, v: Halves) -> Any:
        """Adds the attention over the keys of one step to the sums of each half."""
        added = []
        for query, q_BLHN, so_far in zip(ring.zigzag.numbers(), q, sums, strict=True):
            for key, k_BSKN, v_BSKN in zip(ring.key_numbers(step), k, v, strict=True):

                def attend(
                    so_far: Any, q: Any, k: Any, v: Any, query: Any = query, key: Any = key
                ) -> Any:
                    sight = ring.sight(query, key, segments_BS, local)
                    return add_parts(so_far, attend_part(q, k, v, sight, ring.blocks))

                so_far = jax.lax.cond(
                    ring.is_seen(query, key, local),
                    attend,
                    lambda so_far, *_: so_far,
                    *(so_far, q_BLHN, k_BSKN, v_BSKN),
                )
            added.append(so_far)
        return tuple(added)

    def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
        sums, keys = carry
        # The keys are sent while they are used.
        return (add(sums, number, *keys), ring.pass_on(keys)), None

    batch, half, heads, _ = q[0].shape
    nothing = (
        jnp.zeros((batch, half, heads, v[0].shape[-1]), jnp.float32),
        jnp.full((batch, half, heads), LOWEST, jnp.float32),
    )
    last = ring.zigzag.devices - 1
    (sums, keys), _ = jax.lax.scan(step, ((nothing, nothing), (k, v)), jnp.arange(last))
    early, late = add(sums, last, *keys)
    attended = early[0].astype(q[0].dtype), late[0].astype(q[0].dtype)
    return attended, (q, k, v, segments_BS, local, attended, (early[1], late[1]))


def _backward(ring: Ring, kept: Any, gradients: Halves) -> Any:
    q, k, v, segments_BS, local, attended, log_sums = kept

    def add(sums: Any, step: Any, k: Halves, v: Halves) -> Any:
        """Adds the gradients of queries, and of the keys and values of one step."""
        dq, (dk, dv) = list(sums[0]), (list(x) for x in sums[1])
        for i, query in enumerate(ring.zigzag.numbers()):
            for j, key in enumerate(ring.key_numbers(step)):

                def compute(so_far: Any, arrays: Any, query: Any = query, key: Any = key) -> Any:
                    sight = ring.sight(query, key, segments_BS, local)
                    added = part_gradients(*arrays, sight=sight, blocks=ring.blocks)
                    return jax.tree.map(jnp.add, so_far, added)

                arrays = (q[i], k[j], v[j], attended[i], log_sums[i], gradients[i])
                dq[i], dk[j], dv[j] = jax.lax.cond(
                    ring.is_seen(query, key, local),
                    compute,
                    lambda so_far, *_: so_far,
                    *((dq[i], dk[j], dv[j]), arrays),
                )
        return tuple(dq), (tuple(dk), tuple(dv))

    def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
        (dq, dkv), keys = carry
        dq, dkv = add((dq, dkv), number, *keys)
        # The gradients of keys travel with them, and return to where they began.
        return ((dq, ring.pass_on(dkv)), ring.pass_on(keys)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (q, (k, v)))
    last = ring.zigzag.devices - 1
    (sums, keys), _ = jax.lax.scan(step, (zeros, (k, v)), jnp.arange(last))
    dq, dkv = add(sums, last, *keys)
    found = (dq, *ring.pass_on(dkv))
    return *jax.tree.map(lambda d, x: d.astype(x.dtype), found, (q, k, v)), None, None


_attend.defvjp(_forward, _backward)


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
    by_splash = by_splash and not half % LANES
    blocks = choose_blocks(settings, half, sight.known_window) if by_splash else None

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
