"""The settings of attention."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from train.errors import ConfigError, check_counts

Kind = Literal['auto', 'dot', 'splash']


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
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            check_counts(128, **{f'SplashBlocks.{field.name}': size})
            if size % 128:
                raise ConfigError(
                    f'SplashBlocks.{field.name} is {size}: it must be a multiple of 128'
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """How attention is computed.

    Attributes:
      kind: 'dot' computes the scores of all queries and keys at once; 'splash' is a kernel for TPUs
        that never holds them (elsewhere, it is interpreted, for tests); 'auto' is 'splash' on TPUs
        where it can be, and 'dot' elsewhere.
      splash_blocks: the block sizes of 'splash'.
    """

    kind: Kind = 'auto'
    splash_blocks: SplashBlocks = SplashBlocks()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ', '.join(map(repr, get_args(Kind)))
            raise ConfigError(f'AttentionSettings.kind is {self.kind!r}: use one of {kinds}')
        if not isinstance(self.splash_blocks, SplashBlocks):
            raise ConfigError(
                f'AttentionSettings.splash_blocks is {self.splash_blocks!r}: use a SplashBlocks'
            )
