"""Edits a traced function as if features were split into their parts in another order.

For a split of 512 features into 64 elements of 8 heads, with the heads first,

    b = reshape[(4, 64, 8)] a       t = reshape[(4, 8, 64)] a;  b = transpose[(0, 2, 1)] t
    d = reshape[(4, 512)] c         t = transpose[(0, 2, 1)] c;  d = reshape[(4, 512)] t

Merges of the same parts are edited with the splits, in the forward and in the backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshwright.causes.cause import SplitChange
from meshwright.causes.editing import with_bodies
from partitioning.products.flops import bodies_of


def edit_splits(jaxpr: Any, change: SplitChange) -> Any:
    """Returns a ClosedJaxpr whose reshapes split and merge in another order.

    Args:
      jaxpr: the ClosedJaxpr.
      change: the reshapes and the order of their parts.

    Raises:
      ValueError: if it has none of the reshapes.
    """
    editor = _Editor(change)
    edited = jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr))
    if not editor.count:
        raise ValueError(f'no reshape of {change.source} matches "{change}"')
    return edited


class _Editor:
    def __init__(self, change: SplitChange):
        self._splits = {(before, after): order for before, after, order in change.splits}
        self.count = 0

    def edit(self, jaxpr: Any) -> Any:
        equations: list[Any] = []
        for equation in jaxpr.eqns:
            if bodies_of(equation):
                equations.append(with_bodies(equation, self.edit))
            else:
                equations += self._reorder(equation)
        return jaxpr.replace(eqns=equations)

    def _reorder(self, equation: Any) -> list[Any]:
        """The equations in place of one: a reshape and a move of its parts, or itself."""
        if equation.primitive.name != 'reshape' or equation.params.get('dimensions') is not None:
            return [equation]
        given, made = equation.invars[0].aval, equation.outvars[0].aval
        split = self._splits.get((tuple(given.shape), tuple(made.shape)))
        merged = self._splits.get((tuple(made.shape), tuple(given.shape)))
        if split is not None:
            new = tuple(made.shape[d] for d in split)
            back = tuple(int(d) for d in np.argsort(split))
            written = jax.make_jaxpr(lambda x: x.reshape(new).transpose(back))
        elif merged is not None:
            written = jax.make_jaxpr(lambda x: x.transpose(merged).reshape(made.shape))
        else:
            return [equation]
        self.count += 1
        found = written(jax.ShapeDtypeStruct(given.shape, given.dtype)).jaxpr.eqns
        info = {'source_info': equation.source_info}
        first = found[0].replace(invars=[equation.invars[0]], **info)
        last = found[-1].replace(outvars=list(equation.outvars), **info)
        return [first, last]
