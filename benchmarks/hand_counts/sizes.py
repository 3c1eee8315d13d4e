"""The sizes of the shipped models, and what of a step is counted by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shipped_runs import ShippedRun

FLOAT, BFLOAT = 4, 2  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a shipped model, in the letters of the counts."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    tied: bool = False

    @property
    def attention(self) -> int:
        """The parameters of query, key, value and output of a layer."""
        return self.embed * self.head * 2 * (self.heads + self.kv_heads)

    @property
    def feed_forward(self) -> int:
        """The parameters of the three matrices of a layer."""
        return 3 * self.embed * self.mlp

    @property
    def norms(self) -> int:
        """The parameters of all norms: two per layer and one at the end."""
        return (2 * self.layers + 1) * self.embed

    @property
    def tables(self) -> int:
        """The parameters of the embedding and of the output."""
        return (1 if self.tied else 2) * self.vocab * self.embed

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * (self.attention + self.feed_forward) + self.tables + self.norms


MODELS = {
    '125m': Model(
        vocab=32_768, layers=12, embed=768, heads=12, kv_heads=12, head=64, mlp=2048, tied=True
    ),
    '1b': Model(vocab=32_768, layers=16, embed=2048, heads=32, kv_heads=8, head=64, mlp=8192),
    '8b': Model(vocab=128_256, layers=32, embed=4096, heads=32, kv_heads=8, head=128, mlp=14_336),
    '70b': Model(vocab=128_256, layers=80, embed=8192, heads=64, kv_heads=8, head=128, mlp=28_672),
}

Wire = dict[str, float]  # bytes that a device sends, by 'kind over axes (network)'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(ShippedRun):
    """A forecast, and what is counted by hand.

    Attributes:
      shards: the devices that share each matrix and its moments.
      norm_shards: the devices that share the scales of norms.
      row_shards: the devices that share the batch.
      wire: counts what a device sends; None if the case compares nothing.
      rounds: the sizes of the groups in which gradients are summed and scattered.
      chunks: the columns of the output's chunks: the vocabulary with what fills the last rows.
      tensor: the devices that share a product, in tensor parallelism.
      sums_to_gather: whether the compiler gathers small arrays by sums.
    """

    shards: int
    norm_shards: int
    row_shards: int
    length: int = 2048
    wire: Callable[[Case], Wire] | None = None
    rounds: tuple[int, ...] = ()
    chunks: int = 0
    tensor: int = 1
    sums_to_gather: bool = True
    fits: bool = True

    @property
    def sizes(self) -> Model:
        """The sizes of the model."""
        return MODELS[self.model]

    @property
    def rows(self) -> int:
        """The rows of a device."""
        return self.batch // self.row_shards

    def count_arguments(self) -> int:
        """The bytes of the arguments of a device.

        12 bytes for each parameter that a device has, the step number and two counters of the
        optimizer, and three arrays of the batch: tokens, targets and weights.
        """
        sizes = self.sizes
        matrices = (sizes.parameters - sizes.norms) // self.shards
        state = 3 * FLOAT * (matrices + sizes.norms // self.norm_shards)
        return state + 3 * 4 + 3 * 4 * self.rows * self.length
