"""What train steps of shipped configurations need and send, counted by hand from their sizes."""

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


# The bytes that a device sends to sum, scatter or gather something over n devices in a ring.


def gathered(nbytes: float, n: int) -> float:
    """To gather an array of this size, or to sum it and keep a shard."""
    return nbytes * (n - 1) / n


def summed(nbytes: float, n: int) -> float:
    """To sum an array of this size on all devices: a reduce-scatter and an all-gather."""
    return 2 * gathered(nbytes, n)


def count_data_parallel(case: Case) -> Wire:
    """Every device has all parameters, and all devices sum their gradients.

    Matrices have gradients of bfloat16. A tied embedding has two: of the lookup and of the output.
    The scales of norms have gradients of float32. Three numbers of the loss are summed, too.
    """
    m, n = case.sizes, case.row_shards
    matrices = BFLOAT * (m.layers * (m.attention + m.feed_forward) + 2 * m.vocab * m.embed)
    return {'all-reduce over data (ICI)': summed(matrices + FLOAT * (m.norms + 3), n)}


def count_fsdp(case: Case) -> Wire:
    """Every device has a shard of all parameters; the rounds of the gradients are in `case.rounds`.

    Weights are gathered in bfloat16: the layers' for the forward pass and again for the backward
    pass, the output's once. Each device looks its columns of the embedding up for
    all tokens, which are gathered (int32); its rows of the result come by an all-to-all, and so do
    their gradients. Gradients are summed and scattered, round by round; the output in its chunks.
    On the last round, arrays with heads of 64 are summed whole: they do not fill a row of a tile.
    The scales of norms are float32. They are gathered like weights, and on some machines summed for
    that, from arrays that are zero but for the own shard. Six numbers of the loss are summed.
    """
    m, n = case.sizes, case.shards
    attention, feed_forward = (BFLOAT * m.layers * k for k in (m.attention, m.feed_forward))
    output = BFLOAT * m.vocab * m.embed
    tokens, stream = 4 * case.batch * case.length, BFLOAT * case.rows * case.length * m.embed
    gathering = gathered(2 * (attention + feed_forward) + output + tokens, n)
    to_scatter = feed_forward + BFLOAT * case.chunks * m.embed + attention * (m.head >= 128)
    whole = attention * (m.head < 128)
    small = FLOAT * (m.norms + 6)  # what is summed whole: gradients of norms, and the loss
    norms = FLOAT * (m.norms + 2 * m.layers * m.embed)  # forward, and the layers' norms again
    if case.sums_to_gather:
        small += norms
    else:
        gathering += gathered(norms, n)
    *before, last = case.rounds
    scattering = gathered(to_scatter, n)
    for size in before:
        scattering += gathered(whole, size)
        whole /= size
    wire = {
        'all-gather over data (ICI)': gathering,
        'reduce-scatter over data (ICI)': scattering,
        'all-to-all over data (ICI)': gathered(2 * stream, n),
    }
    return wire | {'all-reduce over data (ICI)': summed(whole, last) + summed(small, n)}


def count_fsdp_tensor(case: Case) -> Wire:
    """FSDP over `data` and tensor parallelism over `model`, with tokens and heads exchanged.

    Between products, a row's tokens lie on the devices of `model`. They are gathered for the two
    products of the MLP's inputs (forward, again, and for the gradient of its output), and the sums
    of its results are scattered over the tokens (forward and backward). Attention instead has its
    weights gathered, and exchanges tokens for heads: queries, keys, values and its result, forward,
    again and backward.
    """
    m, f, t = case.sizes, case.row_shards, case.tensor
    tokens = case.rows * case.length
    stream, numbers = BFLOAT * tokens * m.embed, 4 * tokens
    heads = BFLOAT * tokens * m.head * 2 * (m.heads + m.kv_heads) / t
    query, keys = (BFLOAT * m.embed * m.head * n for n in (m.heads, 2 * m.kv_heads))
    mlp, output = BFLOAT * m.feed_forward / t, BFLOAT * m.embed
    norms = FLOAT * (2 * m.layers + 1) * m.embed
    again = FLOAT * 2 * m.layers * m.embed
    layer = mlp + query + (query + keys) / t  # over data: the last weights of attention come first
    layer_back = mlp + query + keys + query / t
    return {
        'all-gather over model (ICI)': gathered(
            (3 * m.layers + 2) * stream + 2 * m.layers * (query + keys + query / f) + 6 * numbers, t
        ),
        'reduce-scatter over model (ICI)': gathered(
            (2 * m.layers + 1) * stream + m.layers * (query + (query + keys) / f), t
        ),
        'all-to-all over model (ICI)': gathered(3 * m.layers * heads, t),
        'all-reduce over model (ICI)': summed(stream + 5 * numbers, t),
        'all-gather over data (ICI)': gathered(
            2 * m.layers * layer
            + output * m.vocab / t
            + 4 * case.batch * case.length
            + norms
            + again,
            f,
        ),
        'reduce-scatter over data (ICI)': gathered(m.layers * layer_back + output * case.chunks, f),
        'all-to-all over data (ICI)': gathered(2 * stream, f),
        'all-reduce over data, model (ICI)': summed(norms + 6 * FLOAT, f * t),
    }


def count_tensor(case: Case) -> Wire:
    """Tensor parallelism: the results of two products per layer are summed, forward and backward.

    The sums of the forward pass are kept. The lookup in the embedding is summed, too, and the
    gradient of the output's input; and five numbers per token, for the loss.
    """
    tokens = case.rows * case.length
    stream = BFLOAT * tokens * case.sizes.embed
    sums = (4 * case.sizes.layers + 2) * stream + 5 * FLOAT * tokens
    return {'all-reduce over model (ICI)': summed(sums, case.tensor)}


def count_dcn(case: Case) -> Wire:
    """Two slices, each with a shard of all parameters on each device, sum their shards' gradients.

    The gradients of matrices are bfloat16. The gradients of norms are float32 and whole. The last
    norm's gradient and the loss fill whole tiles of 1,024 numbers, and another one a row of 128.
    """
    m = case.sizes
    shard = BFLOAT * (m.parameters - m.norms) / case.shards
    last = 1024 * (m.embed // 1024 + 1) + 128
    norms = FLOAT * (2 * m.layers * m.embed + last)
    return {'all-reduce over replica (DCN)': summed(shard + norms, 2)}
