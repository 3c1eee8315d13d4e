"""The settings of attention."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from partitioning.hardware import chip_of
from train.errors import ConfigError, check_counts

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
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            check_counts(128, **{f'SplashBlocks.{field.name}': size})
            if size % 128:
                raise ConfigError(
                    f'SplashBlocks.{field.name} is {size}: it must be a multiple of 128'
                )


# The sizes with which MaxText's benchmarks train dense models of 7 to 405 billion parameters
# (github.com/AI-Hypercomputer/maxtext, benchmarks/maxtext_*_model_configs.py, 2025), without its
# compiler flags for more memory in the kernels. v5e uses the sizes of `SplashBlocks` there.
_DEFAULTS = {
    'v5p': SplashBlocks(queries=2048, dkv_queries=2048, dq_queries=2048),
    'v6e': SplashBlocks(queries=1024, dkv_queries=2048, dq_queries=2048),
    'tpu7x': SplashBlocks(queries=1024, dkv_queries=2048, dq_queries=2048),
}


def default_splash_blocks(device_kind: str) -> SplashBlocks:
    """Returns the block sizes for devices of this `device_kind`."""
    chip = chip_of(device_kind)
    return _DEFAULTS.get(chip.name if chip else '', SplashBlocks())


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
        if self.kind not in get_args(Kind):
            kinds = ', '.join(map(repr, get_args(Kind)))
            raise ConfigError(f'AttentionSettings.kind is {self.kind!r}: use one of {kinds}')
        for name in ('blockwise_from', 'block_queries', 'block_keys'):
            check_counts(1, **{f'AttentionSettings.{name}': getattr(self, name)})
        if self.context not in get_args(Context):
            contexts = ' or '.join(map(repr, get_args(Context)))
            raise ConfigError(f'AttentionSettings.context is {self.context!r}: use {contexts}')
        if self.context == 'ring' and self.kind in ('cudnn', 'blockwise'):
            raise ConfigError(
                f"AttentionSettings.context is 'ring' and kind is {self.kind!r}: rings compute by "
                "'splash' or 'dot'. Use one of them, 'auto', or context 'gather'"
            )
        if not isinstance(self.splash_blocks, SplashBlocks | None):
            raise ConfigError(
                f'AttentionSettings.splash_blocks is {self.splash_blocks!r}: use a SplashBlocks'
            )
