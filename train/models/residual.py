"""The lengths of a layer that can have their own rules: of the residual stream, of projections.

Between the products of a layer, only norms and sums read the residual stream. They need no two
tokens at once, so the rules can shard its length over the mesh axes that shard heads and hidden
layers (sequence parallelism): `('residual_length', 'model')`. Each device then keeps and norms its
share of the tokens, and the sum over heads or hidden units ends in a reduce-scatter and not in an
all-reduce.

The projections of attention do not need two tokens at once either. With `('projection_length',
'model')` before the rule for 'heads', each device projects its share of the tokens onto all heads,
for which it gathers the parameters, and an all-to-all exchanges tokens for heads. That moves less
than gathering the tokens if a device has more tokens than attention has parameters.

Suffixes of array names: B batch, L length, D embed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
from flax.core import spmd

from partitioning import constrain
from partitioning.rules import AxisRules

LENGTHS = ('length', 'residual_length', 'projection_length')


def length_name(part: Literal['residual', 'projection']) -> str:
    """Returns the logical axis of the length of a part of a layer, under the rules of the context.

    It is 'residual_length' or 'projection_length' if a rule has this name, and otherwise 'length'.
    """
    name = f'{part}_length'
    return name if any(known == name for known, _ in spmd.get_logical_axis_rules()) else 'length'


def residual_names() -> tuple[str, str, str]:
    """Returns the logical axes of the residual stream under the rules of the context."""
    return ('batch', length_name('residual'), 'embed')


def lay_out(x: jax.Array, names: Sequence[str | None], decode: bool = False) -> jax.Array:
    """Lays out an activation by its logical axes.

    While decoding, a dimension whose size its mesh axes do not divide is replicated: there are
    single positions, and batches of any size.
    """
    return constrain(x, names, on_indivisible='replicate' if decode else None)


def lay_out_residual(x_BLD: jax.Array, decode: bool = False) -> jax.Array:
    """Lays out the residual stream by its logical axes."""
    return lay_out(x_BLD, residual_names(), decode)


def gather_length(normed_BLD: jax.Array) -> jax.Array:
    """Lays out a normed residual stream as the products of a layer read it.

    If the residual stream has a length of its own, this gathers the tokens once for all products
    that read them. Without it, compilers gather the weights of the products instead.
    """
    return constrain(normed_BLD, ('batch', 'length', 'embed'))


def lay_out_projected(x_BLHN: jax.Array, heads: str) -> jax.Array:
    """Lays out queries, keys or values, or their mixture, as their projections do."""
    return constrain(x_BLHN, ('batch', length_name('projection'), heads, 'kv'))


@contextlib.contextmanager
def whole_lengths() -> Iterator[None]:
    """Replicates lengths inside, whatever the rules say: decoding has single tokens."""
    rules = AxisRules(spmd.get_logical_axis_rules())
    whole = [(name, None if name in LENGTHS else axes) for name, axes in rules]
    with spmd.logical_axis_rules(rules.with_rules(whole)):
        yield
