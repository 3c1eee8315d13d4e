"""Arrays that no layout suits: rows in another order, vectors of all elements, uneven sizes.

    partner = jax.random.permutation(key, len(images))
    mixed = 0.7 * images + 0.3 * images[partner]    # a device needs rows of all others

    flat, unflatten = ravel_pytree(grads)           # (256, 1024) over 'fsdp' and 'tensor', ...
    grads = unflatten(flat / jnp.linalg.norm(flat))

    logits = constrain(logits, P('data', 'model'))  # a vocabulary of 32,003 on 8 devices

Nothing is sent if a device only takes rows of its own, if single numbers are summed as
optax.global_norm does, and if the vocabulary is padded. Only the author can write it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright.advice.candidates import Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import in_words, spec_text
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import CONSTRAINTS, ELEMENTWISE, MOVES, names_in
from meshwright.jaxpr.values import Axes, Step, Value
from meshwright.program.collectives import Collective
from partitioning.plan.rows import PlanRow

_CUTS = MOVES | names_in('split slice dynamic_slice concatenate')
_SHARE = 0.15  # of the parameters of a device, for a whole parameter to be worth padding
_ELEMENTS = 4  # of a whole dimension on each device, for it to be worth padding


def find_permuted_rows(view: FunctionView) -> Iterator[Told]:
    """Finds the rows of a sharded batch that are taken in an order which the rows do not decide.

    An order that follows from the rows, such as tokens ordered by their experts, is needed.
    """
    found = (_permuted(step, view) for step in view.steps)
    yield from {(one.line, one.match): one for one in found if one is not None}.values()


def _moved(step: Step, value: Value) -> Value | None:
    """What a value is cast or moved from."""
    return step.inputs[0] if step.inputs and step.name in MOVES | KINDS.keys() else None


def _permuted(step: Step, view: FunctionView) -> Told | None:
    if step.name != 'gather' or step.place.is_backward or len(step.inputs) != 2:
        return None
    given, made = view.before_exchange(step.inputs[0]), step.outputs[0]
    numbers = step.params['dimension_numbers']
    if given.shape != made.shape or given.manual or given.nbytes < LEAST:
        return None
    if len(numbers.start_index_map) != 1 or numbers.start_index_map != numbers.collapsed_slice_dims:
        return None
    (d,) = numbers.start_index_map
    kept = [n for n in range(len(made.shape)) if n != d]
    whole = all(step.params['slice_sizes'][n] == given.shape[n] for n in kept)
    axes = tuple(a for a in given.axes[d] or () if view.sizes.get(a, 1) > 1)
    if [*numbers.offset_dims] != kept or not whole or not axes:
        return None
    held = {*(made.axes[d] or axes)}
    if not {*axes} <= held or view.depends_on(step.inputs[1], axes):
        return None
    row, _ = view.argument_of(given, _moved)
    is_kept = row is not None and row.path in view.subject.returned
    if row is not None and row.role != 'other' and is_kept:  # a lookup in a table
        return None
    n, line = view.num_devices(axes), step.line
    each, rest = given.shape[d] // n, ', '.join(str(given.shape[k]) for k in kept)
    lines, shapes = frozenset([line]), frozenset([shape_of(given)])
    return Told(
        match=Match(axes=axes, lines=lines, shapes=shapes),
        line=line,
        why=(
            f'{line} takes the {given.shape[d]:,} rows of {given.shape}, which are sharded over '
            f'{over(axes)}, in an order that is computed, so that each device needs rows of all '
            'others, and gathers all'
        ),
        change=CodeChange(
            source=line,
            text=(
                f'take rows of the same device at {line}: reshape to ({n}, {each}'
                f'{", " + rest if d == 0 and rest else ", ..."}), permute or jnp.roll along the '
                f'dimension of {each:,}, and reshape back, or permute in a shard_map'
            ),
        ),
    )


def find_flattened(view: FunctionView) -> Iterator[Told]:
    """Finds the vectors that arrays of a state are joined in, although they are sharded."""
    seen = set[str]()
    for number, joined in enumerate(view.values):
        parts = _parts(joined, view.rows)
        if len(parts) < 2 or joined.line in seen or joined.nbytes < LEAST:
            continue
        seen.add(joined.line)
        first = parts[0]
        path = first.gradient_of or first.update_of or first.argument
        what = 'the gradients' if first.gradient_of else 'the arrays'
        yield Told(
            match=Match(
                axes=tuple(view.sizes),
                lines=_lines(joined, view.values[number + 1 :]),
                moves=True,
                also=_is_array,
            ),
            line=joined.line,
            array=f'the gradient of {path}' if first.gradient_of else path,
            why=(
                f'{path} and {len(parts) - 1} more are flattened and joined in one vector of '
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
        )


def _is_array(_: Collective, evidence: Evidence | None) -> bool:
    """Whether an exchange moves more than a single number, such as a norm."""
    return evidence is None or evidence.value is None or evidence.value.size > 1


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


@dataclasses.dataclass(frozen=True)
class _Padded:
    """The size of a dimension, the part of a device, and the size with padding."""

    size: int
    part: int
    padded: int

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        """Whether an exchange moves an array with such a dimension."""
        value = None if evidence is None else evidence.value
        moved = {int(size) for text in collective.arrays for size in re.findall(r'\d+', text[3:])}
        # Small parts say little: 2 of 6 heads are as many as 2 rows.
        devices = -(-self.size // self.part)
        told = {self.size, self.padded} | ({self.part} if self.part > max(devices, 16) else set())
        return bool(moved & told) or (value is not None and self.size in value.shape)


def find_uneven(view: FunctionView) -> Iterator[Told]:
    """Finds constraints on sizes that do not divide, and parameters that are whole for that reason.

    jax lays out such a dimension without a word: the compiler pads it, and gathers and cuts the
    array wherever it is used otherwise, or every device has all of it.
    """
    found: dict[tuple[str, int, Axes], Told] = {}
    for value, d, axes, shards in uneven_constraints(view.values, view.sizes):
        one = _constrained(value, d, axes, shards)
        found.setdefault((value.line, value.shape[d], axes), one)
    yield from found.values()
    yield from _whole_parameters(view.rows, view.sizes)


def uneven_constraints(
    values: Iterable[Value], sizes: Mapping[str, int]
) -> Iterator[tuple[Value, int, Axes, int]]:
    """Yields the constraints on dimensions that the devices along their axes do not divide.

    Args:
      values: the values of the function.
      sizes: the size of each mesh axis.

    Yields:
      The constrained value, the dimension, its mesh axes, and the number of devices along them.
    """
    for value in values:
        if value.primitive in CONSTRAINTS and value.layout is not None and not value.backward:
            for d, stated in enumerate(value.layout):
                # Inside a shard_map, the shape is one shard's.
                axes = tuple(axis for axis in stated if axis not in value.manual)
                shards = math.prod(sizes.get(a, 1) for a in axes)
                if value.shape[d] % shards:
                    yield value, d, axes, shards


def _constrained(value: Value, d: int, axes: Axes, shards: int) -> Told:
    n, part = value.shape[d], -(-value.shape[d] // shards)
    padded = part * shards
    dim = value.dims[d]
    origin = f' (dimension {dim.number} of {dim.argument})' if dim and dim.argument else ''
    array = in_words(value.operands[0]) if value.operands else 'an activation'
    return Told(
        match=Match(axes=axes, partly=True, also=_Padded(n, part, padded).is_of),
        removes=False,
        line=value.line,
        array=array,
        why=(
            f'the constraint at {value.line} shards dimension {d} of {value.shape}{origin} over '
            f'{over(axes)}, whose {shards} devices do not divide {n:,}: the compiler pads it to '
            f'{padded:,}, and moves the parts wherever it is used in another way'
        ),
        change=CodeChange(
            source=value.line,
            text=(
                f'make dimension {d}{origin} {padded:,} elements in place of {n:,}, the next '
                f'multiple of {shards}, and mask those that do not count; or leave {over(axes)} '
                f'out of the constraint at {value.line}'
            ),
        ),
    )


def _whole_parameters(rows: Mapping[str, PlanRow], sizes: Mapping[str, int]) -> Iterator[Told]:
    """Large parameters that are whole along an axis that shards others and does not divide them."""
    parameters = [row for row in rows.values() if row.role == 'parameters' and row.shape]
    total = sum(row.bytes_per_device for row in parameters)
    for row in parameters:
        now = axes_of_row(row)
        d = max(range(len(row.shape)), key=lambda d: row.shape[d])
        n = row.shape[d]
        if len(row.shape) < 2 or row.bytes_per_device < _SHARE * total:
            continue
        for axis, size in sizes.items():
            shards = math.prod(sizes.get(a, 1) for a in now[d]) * size
            if size == 1 or n % shards == 0 or n < _ELEMENTS * shards:
                continue
            if any(axis in axes for axes in now) or not _shards(axis, parameters):
                continue
            padded = -(-n // shards) * shards
            wanted = tuple((*axes, axis) if e == d else axes for e, axes in enumerate(now))
            yield Told(
                match=Match(axes=tuple(sizes), also=functools.partial(_is_of_path, row.path)),
                array=row.path,
                is_avoidable=False,
                removes=False,
                why=(
                    f'{row.path}, {row.shape} as {spec_text(now)}, is whole along {axis!r}: the '
                    f'{shards} devices do not divide dimension {d} of {n:,} elements'
                ),
                change=CodeChange(
                    source='',
                    text=(
                        f'make dimension {d} of {row.path} {padded:,} elements in place of {n:,}, '
                        f'the next multiple of {shards}, and lay it out as {spec_text(wanted)}'
                    ),
                ),
            )
            break


def _shards(axis: str, parameters: Iterable[PlanRow]) -> bool:
    return any(axis in axes for row in parameters for axes in axes_of_row(row))


def _is_of_path(path: str, _: Collective, evidence: Evidence | None) -> bool:
    value = None if evidence is None else evidence.value
    return value is not None and path in (value.gradient_of, value.argument)
