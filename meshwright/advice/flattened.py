"""Arrays of a state that are flattened and joined in one vector, which keeps no layout of theirs.

    flat, unflatten = ravel_pytree(grads)           # (256, 1024) over 'fsdp' and 'tensor', ...
    grads = unflatten(flat / jnp.linalg.norm(flat))

All elements move to the devices of the vector, and back. The same function of each array, as
optax.global_norm is, sends single numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshwright.advice.advised import Told
from meshwright.causes.cause import CodeChange, Effect
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row
from meshwright.jaxpr.primitives import ELEMENTWISE, MOVES, names_in
from meshwright.jaxpr.values import Value
from meshwright.program.collectives import Collective
from partitioning.plan.rows import PlanRow

_CUTS = MOVES | names_in('split slice dynamic_slice concatenate')
_SUMS = ('all-reduce', 'reduce-scatter')
_LEAST = 4096  # bytes of the vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flattened(Told):
    """A vector of all elements of several arrays of a state.

    Attributes:
      lines: the lines that make the vector and cut it again.
    """

    lines: frozenset[str]

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        return _is_of(self.lines, collective, evidence)


def find_flattened(
    rows: Mapping[str, PlanRow], explanation: Explanation, peak: int
) -> Iterator[Flattened]:
    """Finds the vectors that arrays of a state are joined in, although they are sharded.

    Args:
      rows: the layout of each argument, by its path.
      explanation: the causes of the exchanges of the function.
      peak: the peak of its memory, in bytes.
    """
    sends = sum(c.total_bytes for c, _ in explanation.collectives)
    pairs = [
        (c, e) for (c, _), e in zip(explanation.collectives, explanation.evidence, strict=True)
    ]
    values, seen = explanation.traced.values, set[str]()
    for number, joined in enumerate(values):
        parts = _parts(joined, rows)
        if len(parts) < 2 or joined.line in seen or joined.nbytes < _LEAST:
            continue
        seen.add(joined.line)
        lines = _lines(joined, values[number + 1 :])
        saved = sum(c.total_bytes for c, e in pairs if _is_of(lines, c, e))
        if not saved:
            continue
        first = parts[0]
        path = first.gradient_of or first.update_of or first.argument
        what = 'the gradients' if first.gradient_of else 'the arrays'
        more = len(parts) - 1
        yield Flattened(
            line=joined.line,
            lines=lines,
            array=f'the gradient of {path}' if first.gradient_of else path,
            why=(
                f'{path} and {more} more are flattened and joined in one vector of '
                f'{joined.size:,} elements at {joined.line}, which cannot keep their shardings, '
                'so their elements move to the devices of the vector, and back where it is cut'
            ),
            change=CodeChange(
                source=joined.line,
                text=(
                    f'keep {what} apart at {joined.line}, and do not join them in one vector: '
                    'write jax.tree.map(...) for what is done with single elements, and '
                    'optax.global_norm(tree) for the norm of all'
                ),
            ),
            effect=Effect(sent=(sends, sends - saved), peak=(peak, peak)),
        )


def _parts(joined: Value, rows: Mapping[str, PlanRow]) -> list[Value]:
    """The sharded arrays of a state that a concatenation joins in one vector."""
    if joined.primitive != 'concatenate' or len(joined.shape) != 1:
        return []
    found = []
    for operand in joined.operands:
        value = operand
        while value.primitive in MOVES and len(value.shape) < 2 and value.operands:
            value = value.operands[0]
        row = rows.get(value.gradient_of or value.update_of or value.argument)
        if row is None or row.role == 'other' or len(value.shape) < 2:
            continue
        if any(axes_of_row(row)):
            found.append(value)
    return found


def _lines(joined: Value, later: Sequence[Value]) -> frozenset[str]:
    """The lines that flatten, join and cut the vector."""
    found = {joined.line, *(operand.line for operand in joined.operands)}
    flat = {id(joined)}
    for value in later:
        if not any(id(operand) in flat for operand in value.operands):
            continue
        if value.primitive in _CUTS:
            found.add(value.line)
        if len(value.shape) == 1 and value.primitive in _CUTS | ELEMENTWISE:
            flat.add(id(value))
    return frozenset(found)


def _is_of(lines: frozenset[str], collective: Collective, evidence: Evidence | None) -> bool:
    """Whether an exchange moves what the lines flatten or cut; sums of gradients do not."""
    value = None if evidence is None else evidence.value
    if evidence is None:
        return collective.source in lines and collective.kind not in _SUMS
    if collective.kind in _SUMS and (value is None or value.gradient_of or value.contracted):
        return False
    if value is not None and value.size <= 1:
        return False
    return bool(lines & {evidence.made_at, evidence.used_at, collective.source})
