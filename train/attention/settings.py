"""The settings of attention."""

from __future__ import annotations

import dataclasses
from typing import Literal

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
    """

    queries: int = 512
    keys: int = 512
    keys_compute: int = 512
    dkv_queries: int = 512
    dkv_keys: int = 512
    dkv_keys_compute: int = 512
    dq_queries: int = 512
    dq_keys: int = 512

    def __post_init__(self) -> None:
        check_fields(SplashBlocks, self, 'SplashBlocks.')
        for name, size in vars(self).items():
            if size % 128:
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
      splash_blocks: the block sizes of 'splash'. By default, they suit the chip.
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
