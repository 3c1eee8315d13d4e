"""The layout of the residual stream, whose length can have its own rule.

Between the products of a layer, only norms and sums read the residual stream. They need no two
tokens at once, so the rules can shard its length over the mesh axes that shard heads and hidden
layers (sequence parallelism): `('residual_length', 'model')`. Each device then keeps and norms its
share of the tokens, and the sum over heads or hidden units ends in a reduce-scatter and not in an
all-reduce.

Suffixes of array names: B batch, L length, D embed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from flax.core import spmd

from partitioning import constrain
from partitioning.rules import AxisRules

LENGTHS = ('length', 'residual_length')


def residual_names() -> tuple[str, str, str]:
    """Returns the logical axes of the residual stream under the rules of the context.

    Its length is 'residual_length' if a rule has this name, and otherwise 'length'.
    """
    known = {name for name, _ in spmd.get_logical_axis_rules()}
    return ('batch', 'residual_length' if 'residual_length' in known else 'length', 'embed')


def lay_out_residual(x_BLD: jax.Array) -> jax.Array:
    """Lays out the residual stream by its logical axes."""
    return constrain(x_BLD, residual_names())


def gather_length(normed_BLD: jax.Array) -> jax.Array:
    """Lays out a normed residual stream as the products of a layer read it.

    If the residual stream has a length of its own, this gathers the tokens once for all products
    that read them. Without it, compilers gather the weights of the products instead.
    """
    return constrain(normed_BLD, ('batch', 'length', 'embed'))


@contextlib.contextmanager
def whole_lengths() -> Iterator[None]:
    """Replicates lengths inside, whatever the rules say: decoding has single tokens."""
    rules = AxisRules(spmd.get_logical_axis_rules())
    whole = [(name, None if name in LENGTHS else axes) for name, axes in rules]
    with spmd.logical_axis_rules(rules.with_rules(whole)):
        yield
