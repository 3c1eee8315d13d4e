"""Which keys each query may see, with which scores, and the settings of attention.

Suffixes of array names: B batch, L length (queries), S slots (keys and values).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from train.errors import ConfigError, check_fields

# The name of the arrays that `jax.checkpoint` has to keep so that attention is not recomputed.
ATTENDED = 'attended'
Kind = Literal['auto', 'dot', 'splash', 'cudnn', 'blockwise']
Context = Literal['gather', 'ring']


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """Block sizes of splash attention, in positions.

    The kernels use, for each size, the largest multiple of 128 that divides the length and is at
    most this size.

    Attributes:
      queries: the queries that the forward kernel holds at a time.
      keys: the keys and values that it fetches at a time.
      keys_compute: the keys that it multiplies at a time; it must divide `keys`.
      dkv_queries: as `queries`, in the kernel of the gradients of keys and values.
      dkv_keys: as `keys`, in that kernel.
      dkv_keys_compute: as `keys_compute`, in that kernel.
      dq_queries: as `queries`, in the kernel of the gradient of queries.
      dq_keys: as `keys`, in that kernel.
      fused: whether the kernel of the gradients of keys and values also computes the gradient of
        queries, with 5 products in place of 7. It returns one array of the size of the queries per
        `dkv_keys` of the row, which are summed. Devices that share a row always use two kernels.
    """

    queries: int = 512
    keys: int = 512
    keys_compute: int = 512
    dkv_queries: int = 512
    dkv_keys: int = 512
    dkv_keys_compute: int = 512
    dq_queries: int = 512
    dq_keys: int = 512
    fused: bool = False

    def __post_init__(self) -> None:
        check_fields(SplashBlocks, self, 'SplashBlocks.')
        for name, size in vars(self).items():
            if size % 128 and name != 'fused':
                raise ConfigError(f'SplashBlocks.{name} is {size}: it must be a multiple of 128')


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """How attention is computed. Every kind computes the same function.

    Attributes:
      kind: 'dot' computes the scores of all queries and keys at once. The others never hold them:
        'blockwise' is plain jax for every machine, 'splash' are kernels for TPUs (elsewhere they
        are interpreted, for tests), 'cudnn' are kernels for GPUs. 'auto' is 'splash' on TPUs and
        'cudnn' on GPUs where these allow it; otherwise 'blockwise' for long rows, and 'dot'.
      blockwise_from: the length of rows from which 'auto' is 'blockwise': the number of queries
        times the number of keys is at least its square.
      block_queries: the largest number of queries of a block of 'blockwise'.
      block_keys: the largest number of keys of a block of 'blockwise'.
      splash_blocks: the block sizes of 'splash'. By default, they suit the chip, the length and
        the window, see `train.attention.splash.choose_blocks`.
      context: how devices that share rows exchange keys and values: 'gather' gives all keys of a
        row to each of them; 'ring' passes them around, so that no device holds them all. A ring
        computes by 'splash', or all scores of its parts at once ('dot').
    """

    kind: Kind = 'auto'
    blockwise_from: int = 512
    block_queries: int = 256
    block_keys: int = 256
    splash_blocks: SplashBlocks | None = None
    context: Context = 'gather'

    def __post_init__(self) -> None:
        check_fields(AttentionSettings, self, 'AttentionSettings.')
        if self.context == 'ring' and self.kind in ('cudnn', 'blockwise'):
            raise ConfigError(
                f"AttentionSettings.context is 'ring' and kind is {self.kind!r}: rings compute by "
                "'splash' or 'dot'. Use one of them, 'auto', or context 'gather'"
            )


def sees_any(window: int | None, nearest: Any, farthest: Any) -> Any:
    """Returns whether a query sees a key at any distance from `nearest` to `farthest`.

    A distance is the place of the query less the place of the key: integers or arrays.

    Args:
      window: the first distance that is too far, or None if there is none.
      nearest: the least distance. It may be negative, where nothing is seen.
    """
    seen = farthest >= 0
    return seen if window is None else seen & (nearest < window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """What each query sees: keys at its own place and before it, in its window and its segment.

    The place of a key is its slot 0, 1, 2, ..., and the place of query number n is `first` + n.

    Attributes:
      first: the place of the first query, an integer or a scalar array.
      window: the number of keys that a query sees if `local`: its own and those before it. None is
        no window.
      local: whether the window applies, a bool or a scalar array.
      segments_BL: the int segment of each query, or None if a row is one segment. A query sees only
        keys of its own segment.
      key_segments_BS: the same of each key. By default, `segments_BL`.
      scale: the factor of the products of queries and keys, which makes scores of them.
      soft_cap: bounds the scores by soft_cap * tanh(score / soft_cap). None is no bound.
    """

    first: int | jax.Array = 0
    window: int | None = None
    local: bool | jax.Array = True
    segments_BL: jax.Array | None = None
    key_segments_BS: jax.Array | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def segments_BS(self) -> jax.Array | None:
        """The segment of each key, or None if a row is one segment."""
        if self.segments_BL is None or self.key_segments_BS is None:
            return self.segments_BL
        return self.key_segments_BS

    @property
    def known_window(self) -> int | None:
        """The window that applies whatever the arrays are, or None if there is none."""
        return self.window if isinstance(self.local, bool) and self.local else None

    @property
    def chooses(self) -> bool:
        """Whether an array decides if the window applies."""
        return self.window is not None and not isinstance(self.local, bool)

    def by_window(self, run: Callable[..., Any], *arrays: Any) -> Any:
        """Returns `run(window, *arrays)` for the window that applies, which an array may choose."""
        if not self.chooses:
            return run(self.known_window, *arrays)
        choices = (functools.partial(run, window) for window in (self.window, None))
        return jax.lax.cond(self.local, *choices, *arrays)

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the fields that are arrays."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {n: x for n, x in fields.items() if not isinstance(x, int | float | None)}

    def without_arrays(self) -> Sight:
        """Returns the fields that are not arrays, and None for those that are; it can be hashed."""
        nothing: dict[str, Any] = dict.fromkeys(self.arrays())
        return dataclasses.replace(self, **nothing)

    def bound(self, scores: jax.Array) -> jax.Array:
        """Returns the scores within the soft cap."""
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def mask(self, length: int, slots: int) -> jax.Array:
        """Returns whether each query sees each key: bool [batch or 1, 1, length, slots]."""
        distance_LS = self.first + jnp.arange(length)[:, None] - jnp.arange(slots)
        mask = self.sees(distance_LS)[None, None]
        if self.segments_BL is not None and self.segments_BS is not None:
            mask &= (self.segments_BL[:, :, None] == self.segments_BS[:, None, :])[:, None]
        return mask

    def sees(self, distance: Any) -> Any:
        """Returns whether a query sees keys of its segment at this distance."""
        return self.sees_any(distance, distance)

    def sees_any(self, nearest: Any, farthest: Any) -> Any:
        """Returns whether a query sees keys of its segment from `nearest` to `farthest`."""
        seen = sees_any(self.known_window, nearest, farthest)
        if self.chooses:
            seen &= (nearest < self.window) | jnp.logical_not(self.local)
        return seen
