"""Small factors that are multiplied with each other first, whose gradient is then exchanged whole.

    def adapted(x, w, a, b):          # w (512, 2048), a (512, 8), b (8, 2048)
        return x @ (w + a @ b)        # the gradient of a @ b, (512, 2048), is summed over the rows
        return x @ w + (x @ a) @ b    # only the gradients of a and b are

The backward pass has g = x' dy, which is summed over devices, and then g b' and a' g. Computed as
x' (dy b') and (a' x') dy, only the small results are summed. So is the trace, to try it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from meshwright.advice.candidates import SUMS, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import FunctionView
from meshwright.advice.rewriting import Rewriting, rewrite
from meshwright.causes.cause import CodeChange, over
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.exchange_list import walk_exchanges
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import ELEMENTWISE, SCATTERS, names_in
from meshwright.jaxpr.values import Axes, Value

_UPDATED = ELEMENTWISE | SCATTERS | KINDS.keys() | {'dynamic_update_slice'}
_SAME = names_in('transpose convert_element_type copy sharding_constraint neg mul div')
_SMALLER = 0.5  # the share of the elements of a product that the products with it may have
_MORE_FLOPS = 1.05


@dataclasses.dataclass(frozen=True, eq=False)
class _Chain:
    """A product of the backward pass, and a product with it: of the operand of this number.

    Attributes:
      first, second: the products.
      number: which operand of the second one is the first one, moved.
      order: the dimension of the first product that each dimension of this operand is.
    """

    first: Value
    second: Value
    number: int
    order: tuple[int, ...]

    @property
    def labels(self) -> tuple[str, str, str, str] | None:
        """Labels for the dimensions of both operands of the first product, of what it is multiplied
        with, and of the result, as for `einsum`; None for products of stacks."""
        letters = iter(string.ascii_letters)
        (left, right), (batch, _) = _numbers(self.first)
        ((mine, theirs), (stacked, _)) = _numbers(self.second)
        if batch or stacked:
            return None
        x = [next(letters) for _ in self.first.operands[0].shape]
        y = [next(letters) for _ in self.first.operands[1].shape]
        for d, e in zip(left, right, strict=True):
            y[e] = x[d]
        whole = [c for d, c in enumerate(x) if d not in left]
        whole += [c for e, c in enumerate(y) if e not in right]
        moved = [whole[d] for d in self.order]
        mine, theirs = (theirs, mine) if self.number else (mine, theirs)
        z = [next(letters) for _ in self.second.operands[1 - self.number].shape]
        for d, e in zip(mine, theirs, strict=True):
            z[e] = moved[d]
        summed = {moved[d] for d in mine}
        if not (summed <= {*x} or summed <= {*y}):
            return None
        rest = [[c for c in one if c not in summed] for one in (moved, z)]
        made = rest[1] + rest[0] if self.number else rest[0] + rest[1]
        return ''.join(x), ''.join(y), ''.join(z), ''.join(made)

    @property
    def flops(self) -> tuple[int, int]:
        """The multiplications of the second product, and of both products in the other order."""
        other = self.second.operands[1 - self.number]
        (mine, theirs), _ = _numbers(self.second)
        shape = [n for d, n in enumerate(other.shape) if d not in (mine, theirs)[1 - self.number]]
        rank = functools.reduce(lambda a, b: a * b, shape, 1)
        return self.first.size * rank, rank * sum(one.size for one in self.first.operands[:2])


def find_merged_factors(view: FunctionView) -> Iterator[Told]:
    """Finds sums over devices of products of which only small products are used."""
    axes_of: dict[int, Axes] = {
        id(step.place.equation): axes for step, axes, _ in walk_exchanges(view.laid_out)
    }
    readers: dict[int, list[Value]] = collections.defaultdict(list)
    for value in view.values:
        for operand in {id(one): one for one in value.operands}.values():
            readers[id(operand)].append(value)
    found: dict[str, list[_Chain]] = collections.defaultdict(list)
    for value in view.values:
        if value.primitive != 'dot_general' or not value.backward or value.manual:
            continue
        if id(_equation(value)) in axes_of:
            found[value.line] += _better(value, readers)
    for line, chains in found.items():
        if not chains:
            continue
        first = max((chain.first for chain in chains), key=lambda one: one.size)
        axes = axes_of[id(_equation(first))]
        shapes = frozenset(shape_of(chain.first) for chain in chains)
        lines = frozenset([line])
        yield Told(
            match=Match(axes=axes, kinds=SUMS, lines=lines, shapes=shapes, backward=True),
            line=line,
            why=(
                f'the gradient of a product of two factors, {first.shape}, is summed over '
                f'{over(axes)} for {line}, although only its products with the factors are used'
            ),
            change=CodeChange(
                source=line,
                text=(
                    f'multiply with one factor after the other at {line}: write (x @ a) @ b in '
                    'place of x @ (a @ b), and add x @ w where a weight is added to them'
                ),
            ),
            trial=functools.partial(_multiply_later, view.subject.call, chains),
        )


def _better(first: Value, readers: Mapping[int, Sequence[Value]]) -> list[_Chain]:
    """The products with a product, if all are small and another order is not more work."""
    found: list[_Chain] = []
    pending = [(first, tuple(range(len(first.shape))))]
    while pending:
        value, order = pending.pop()
        for reader in readers[id(value)]:
            if reader.primitive == 'dot_general':
                one, other = reader.operands[:2]
                if one is other:
                    return []
                found.append(_Chain(first, reader, int(other is value), order))
            elif _keeps(reader, value) and reader.maker:
                permutation = reader.maker.params.get('permutation', range(len(order)))
                pending.append((reader, tuple(order[d] for d in permutation)))
            else:
                return []
    if not found or sum(chain.second.size for chain in found) > _SMALLER * first.size:
        return []
    if any(not chain.second.backward or chain.labels is None for chain in found):
        return []
    (summed, _), _ = _numbers(first)
    count = functools.reduce(lambda a, d: a * first.operands[0].shape[d], summed, 1)
    before = count * first.size + sum(chain.flops[0] for chain in found)
    after = sum(chain.flops[1] for chain in found)
    return found if after <= _MORE_FLOPS * before else []


def _keeps(reader: Value, value: Value) -> bool:
    """Whether a value is another one moved, cast, or times a scalar."""
    if reader.primitive not in _SAME or reader.size != value.size:
        return False
    others = [one for one in reader.operands if one is not value]
    return all(
        one.size == 1
        or (one.primitive == 'broadcast_in_dim' and all(o.size == 1 for o in one.operands))
        for one in others
    )


def _numbers(product: Value) -> Any:
    assert product.maker is not None
    return product.maker.params['dimension_numbers']


def _equation(value: Value) -> Any:
    return None if value.maker is None else value.maker.place.equation


def _multiply_later(call: TracedCall, chains: Sequence[_Chain]) -> TracedCall:
    """The function with the other order of products, up to a factor."""
    operands: dict[int, list[Any]] = {}
    edits: dict[int, Any] = {}
    for chain in chains:

        def keep(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
            operands[id(equation)] = args
            aval = equation.outvars[0].aval
            return [jnp.zeros(aval.shape, aval.dtype)]

        def multiply(
            rewriting: Rewriting, equation: Any, args: list[Any], chain: _Chain = chain
        ) -> list[Any]:
            assert chain.labels is not None
            x, y, z, made = chain.labels
            one, other = operands[id(_equation(chain.first))]
            if {*z} & {*x}:
                x, y, one, other = y, x, other, one
            inner = ''.join(dict.fromkeys(c for c in y + z if not (c in y and c in z)))
            rest = jnp.einsum(f'{y},{z}->{inner}', other, args[1 - chain.number])
            result = jnp.einsum(f'{x},{inner}->{made}', one, rest)
            return [result.astype(equation.outvars[0].aval.dtype)]

        edits[id(_equation(chain.first))] = keep
        edits[id(_equation(chain.second))] = multiply
    return rewrite(call, edits)
