"""Checks of arguments: arrays that are whole, batches, optimizer states, and constants."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.causes.row_axes import ROW_AXES
from meshwright.findings.forward_layouts import DENSE_PRODUCTS
from meshwright.findings.program_facts import ProgramFacts, free_dimension
from meshwright.findings.wording import and_more, axes_str, type_str
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.values import Axes, Step
from partitioning.amounts import bytes_str, bytes_strs, share_str
from partitioning.plan.findings import Finding

_SHARE_OF_ROWS, _SHARE = 0.05, 0.15  # of the parameters of a device, for an array to be large
_LARGE_CONSTANT, _LEAST_CONSTANT = 2**20, 2**16  # bytes
_SHARE_OF_BATCH, _SHARE_OF_MEMORY = 0.05, 0.01  # of the arguments of a device
_FEW, _MOST = 0.25, 0.75  # of the parameters: few may have another axis than most by mistake
_LEAST = 1024  # bytes of an array that is worth a finding


def find_whole_arrays(facts: ProgramFacts) -> Iterator[Finding]:
    """Large parameters that are whole along an axis which shards others like them.

    First come parameters over another mesh axis than most: no others should be like these.
    """
    total = sum(map(facts.shard_bytes, facts.weights))
    like_others = set[int]()
    mixed_up = {axis: found for axis in facts.sizes if (found := _mixed_up(facts, axis))}
    for axis, found in mixed_up.items():
        yield _other_axis(facts, axis, *found)
    for axis in facts.sizes:
        sharded = [j for j in facts.weights if _has(facts.axes[j], axis)]
        if not sharded or axis in mixed_up:
            continue
        least = min(map(facts.layer_bytes, sharded))
        groups: dict[str, list[int]] = collections.defaultdict(list)
        layouts = dict[int, tuple[Axes, ...]]()
        for i in facts.weights:
            if _has(facts.axes[i], axis) or facts.layer_bytes(i) < max(least, _LEAST):
                continue
            if i in like_others or _is_divided(facts, i, axis):
                continue
            alike = [j for j in sharded if _are_alike(facts, i, j)]
            like = next((j for j in alike if _last(facts.path(i)) == _last(facts.path(j))), None)
            like = alike[0] if like is None and alike else like
            shape = facts.block.inputs[i].shape
            d = free_dimension(shape, facts.axes[i], axis, facts.sizes)
            share = facts.shard_bytes(i) / total
            if like is None and (d is None or not _is_large(facts, i, axis, sharded, share)):
                continue
            if like is not None:
                layouts[i] = facts.axes[like]
                like_others.add(i)
            else:
                assert d is not None
                layouts[i] = _with_axis(facts.axes[i], d, axis)
            groups[f'{_last(facts.path(i))} {axes_str(layouts[i])}'].append(i)
        for group in groups.values():
            i = group[0]
            held = sum(map(facts.shard_bytes, group))
            less = sum(facts.nbytes(i) / facts.shards(layouts[i]) for i in group)
            yield Finding(
                'warning',
                'whole array',
                facts.path(i),
                f'{and_more(group)}{bytes_str(held)} on each device '
                f'({share_str(held / total)} of its parameters) are whole along {axis!r}, '
                f'which shards {len(sharded)} of {len(facts.weights)} parameters, such as '
                f'{facts.path(sharded[0])}: write {axes_str(layouts[i])}, with which it is '
                f'{bytes_str(less)}{_used_at(facts, i)}{_gathered(facts, group, axis)}',
            )


def _other_axis(
    facts: ProgramFacts, axis: str, group: list[int], wanted: str, j: int, layout: tuple[Axes, ...]
) -> Finding:
    """Parameters over another mesh axis than most, as `_mixed_up` found them."""
    others = [n for n in facts.weights if _has(facts.axes[n], wanted)]
    return Finding(
        'warning',
        'other axis',
        facts.path(group[0]),
        f'{and_more(group)}it is sharded over {axis!r}, which shards no other parameters, and '
        f'not over {wanted!r}, which shards {len(others)} of {len(facts.weights)}, such as '
        f'{facts.path(j)}: write {axes_str(layout)} for it{_used_at(facts, group[0])}',
    )


def _mixed_up(
    facts: ProgramFacts, axis: str
) -> tuple[list[int], str, int, tuple[Axes, ...]] | None:
    """The few parameters over an axis in place of the one of most, or of what products pair.

    Returns:
      Their numbers, the other axis, a parameter that is sharded over it, and the layout of the
      first one with the other axis in place of the first; None if there are none.
    """
    group = [i for i in facts.weights if _has(facts.axes[i], axis)]
    if not group or len(group) > _FEW * len(facts.weights):
        return None
    i = next((i for i in group if facts.uses.get(facts.path(i))), group[0])
    if any(facts.axes[n] != facts.axes[i] for n in group):
        return None
    d = next(d for d, own in enumerate(facts.axes[i]) if axis in own)
    rest = [j for j in facts.weights if j not in group]
    for wanted in (a for a in facts.sizes if a != axis and not _has(facts.axes[i], a)):
        others = [j for j in rest if _has(facts.axes[j], wanted)]
        is_usual = len(others) >= _MOST * len(facts.weights)
        for j in others:
            e = next(e for e, own in enumerate(facts.axes[j]) if wanted in own)
            layout = tuple(tuple(wanted if a == axis else a for a in own) for own in facts.axes[i])
            fits = facts.block.inputs[i].shape[d] % facts.shards(layout) == 0
            if fits and (is_usual or facts.are_paired((i, d), (j, e))):
                return [i, *(n for n in group if n != i)], wanted, j, layout
    return None


def _gathered(facts: ProgramFacts, group: Sequence[int], axis: str) -> str:
    """What sharding arrays over an axis of the batch costs: '; each gather for use sends 29 MB'."""
    if axis not in facts.row_axes and axis not in ROW_AXES:
        return ''
    size, products = facts.sizes[axis], [i for i in group if facts.uses.get(facts.path(i))]
    sent = sum(facts.nbytes(i) / facts.shards(facts.axes[i]) for i in products) * (size - 1) / size
    return f'; each time it is gathered for use, a device sends {bytes_str(sent)}' if sent else ''


def _is_divided(facts: ProgramFacts, i: int, axis: str) -> bool:
    """Whether devices along an axis multiply an array with different rows, as far as is known.

    Such as the second factor of an adapter, whose first one has sharded rows.
    """
    if axis in facts.row_axes or axis in ROW_AXES:
        return False
    uses = facts.uses.get(facts.path(i), ())
    products = [step for step in uses if step.name in DENSE_PRODUCTS]
    return len(products) == len(uses) and all(
        _has_rows_along(facts, step, facts.path(i), axis) for step in products
    )


def _has_rows_along(facts: ProgramFacts, product: Step, path: str, axis: str) -> bool:
    factors = find_factors(product)
    return any(
        facts.layouts.may_have(other, d, axis)
        for other, dims in zip(product.inputs[:2], factors.inputs, strict=False)
        for d, dim in enumerate(dims)
        if other.argument != path and not {*dim} & factors.summed
    )


def _is_large(facts: ProgramFacts, i: int, axis: str, sharded: Sequence[int], share: float) -> bool:
    """Whether an array without others like it should be sharded along an axis, too.

    An axis that shards experts, stages or tables only is not for the other arrays, which may be
    whole on purpose, as in data parallel training. Lookups in an array of rows that are whole send
    nothing.
    """
    alike = [j for j in sharded if _is_multiplied(facts, j) == _is_multiplied(facts, i)]
    stacked = all(len(facts.axes[j]) >= 3 and axis in facts.axes[j][0] for j in sharded)
    if not facts.uses.get(facts.path(i)) or not alike or stacked:
        return False
    if axis in facts.row_axes or axis in ROW_AXES:
        return share >= _SHARE_OF_ROWS
    # An axis of tensors that shards matrices says nothing of convolutions.
    like_it = any(_names(facts, j) & _names(facts, i) for j in alike)
    return share >= _SHARE and _is_multiplied(facts, i) and like_it


def _names(facts: ProgramFacts, i: int) -> set[str]:
    return {step.name for step in facts.uses.get(facts.path(i), ())}


def _is_multiplied(facts: ProgramFacts, i: int) -> bool:
    return any(step.name != 'gather' for step in facts.uses.get(facts.path(i), ()))


def _are_alike(facts: ProgramFacts, i: int, j: int) -> bool:
    """Whether one array has the shape of another one, which is sharded along more axes."""
    if facts.block.inputs[i].shape != facts.block.inputs[j].shape:
        return False
    mine, theirs = ({a for own in facts.axes[n] for a in own} for n in (i, j))
    return mine < theirs


def find_whole_batches(facts: ProgramFacts) -> Iterator[Finding]:
    """Batches whose rows could be divided along an axis, and are not."""
    total = sum(map(facts.nbytes, facts.batch))
    used = {a for axes in facts.axes for own in axes for a in own}
    for axis, size in facts.sizes.items():
        whole = [i for i in facts.batch if not _has(facts.axes[i], axis)]
        others = [i for i in facts.batch if i not in whole]
        fitting = [i for i in whole if _fits_rows(facts, i, size)]
        if not fitting:
            continue
        if others:
            fitting = [i for i in fitting if facts.nbytes(i) >= _SHARE_OF_BATCH * total]
            fitting = [i for i in fitting if _is_costly(facts, i)]
        elif axis in facts.activation_axes | facts.data_axes or (
            axis in used and not facts.is_meant_for_rows(axis)
        ):
            continue
        if not fitting:
            continue
        i = max(fitting, key=facts.nbytes)
        rows = facts.block.inputs[i].shape[0]
        kept = (*facts.axes[i][0], axis)
        does = f'the {size} devices along it compute the same rows'
        if others:  # an argument of a batch that is sharded
            held, less = bytes_strs(facts.shard_bytes(i), facts.shard_bytes(i) / size)
            does = f'each device holds {held} in place of {less}'
        unlike = f', unlike {facts.path(others[0])}' if others else ''
        yield Finding(
            'warning',
            'whole batch',
            facts.path(i),
            f'{and_more(fitting)}its {rows:,} rows are not divided along {axis!r}{unlike}: {does}; '
            f'write {axes_str((kept, *facts.axes[i][1:]))}',
        )


def _fits_rows(facts: ProgramFacts, i: int, size: int) -> bool:
    shards = math.prod(facts.sizes.get(a, 1) for a in facts.axes[i][0])
    return facts.block.inputs[i].shape[0] % (shards * size) == 0


def _is_costly(facts: ProgramFacts, i: int) -> bool:
    """Whether an array whose rows are whole costs anything: memory, or work with its rows."""
    held = sum(map(facts.shard_bytes, range(len(facts.held))))
    return facts.shard_bytes(i) >= _SHARE_OF_MEMORY * held or bool(facts.uses.get(facts.path(i)))


def find_unlike_optimizer_states(facts: ProgramFacts) -> Iterator[Finding]:
    """Arrays of the optimizer that are laid out coarser than their parameter or its other arrays.

    A step may keep its parameters whole and divide what the optimizer keeps of them (ZeRO-1), but
    then it divides all of that.
    """
    of_owner: dict[int, list[int]] = collections.defaultdict(list)
    for i, array in enumerate(facts.held):
        j = facts.owners.get(i)
        if array.role != 'optimizer' or facts.nbytes(i) < _LEAST or j is None:
            continue
        if facts.traced.arguments[i] is not None and facts.traced.arguments[j] is not None:
            of_owner[j].append(i)
    found: dict[tuple[str, str], list[tuple[int, int]]] = collections.defaultdict(list)
    for j, states in of_owner.items():
        shape = facts.block.inputs[j].shape
        twins = [i for i in states if facts.block.inputs[i].shape == shape]
        # The parameter comes first, so that it wins if nothing is divided further.
        like = max([j, *twins], key=lambda one: facts.shards(facts.axes[one]))
        for i in states:
            pairs = zip(facts.axes[i], facts.axes[like], strict=True)
            if not all(mine[: len(theirs)] == theirs for mine, theirs in pairs):
                key = axes_str(facts.axes[i]), axes_str(facts.axes[like])
                found[key].append((i, like))
    for (mine, theirs), group in found.items():
        (i, like), nbytes = group[0], sum(facts.shard_bytes(i) for i, _ in group)
        wanted = sum(facts.shard_bytes(one) for _, one in group)
        held, needed = bytes_strs(nbytes, wanted)
        size = f'{held} on each device in place of {needed}'
        why = size if nbytes > wanted else f'{bytes_str(nbytes)} are exchanged in each step'
        other = 'its parameter' if like in of_owner else 'another state of its parameter'
        yield Finding(
            'warning',
            'optimizer layout',
            facts.path(i),
            f'{and_more(group)}this state is laid out by {mine}, and {other} '
            f'{facts.path(like)} by {theirs} ({why}): write {theirs} for it, too',
        )


def find_constants(facts: ProgramFacts) -> Iterator[Finding]:
    """Large arrays that the function closes over."""
    given = sum(map(facts.shard_bytes, range(len(facts.held))))
    values = [v for step in facts.steps for v in step.inputs if v.constant is not None]
    users: dict[int, Step] = {}
    for step in facts.steps:
        for value in step.inputs:
            if value.constant is not None:
                users.setdefault(id(value.constant), step)
    seen = set[int]()
    for value in values:
        constant: Any = value.constant
        if id(constant) in seen or value.size <= 1:
            continue
        seen.add(id(constant))
        large = value.nbytes >= _LARGE_CONSTANT or (
            value.nbytes >= max(_LEAST_CONSTANT, given / 10)
        )
        if not large or (isinstance(constant, jax.Array) and _is_sharded(constant)):
            continue
        outside = ''
        if isinstance(constant, jax.Array) and facts.sizes:
            outside = ' on one device, outside of the mesh, which prints like a replicated one'
        yield Finding(
            'warning',
            'constant',
            users[id(constant)].line,
            f'the function closes over {type_str(value)}{outside}: its '
            f'{bytes_str(value.nbytes)} are a constant of the program, whole on every device, and '
            'make compiling slower; pass it as an argument with a sharding',
        )


def _is_sharded(constant: jax.Array) -> bool:
    sharding = constant.sharding
    return isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated


def _has(axes: Sequence[Axes], axis: str) -> bool:
    return any(axis in own for own in axes)


def _with_axis(axes: Sequence[Axes], d: int, axis: str) -> tuple[Axes, ...]:
    return tuple((*own, axis) if n == d else own for n, own in enumerate(axes))


def _last(path: str) -> str:
    return path.rpartition('/')[2]


def _used_at(facts: ProgramFacts, i: int) -> str:
    uses = facts.uses.get(facts.path(i))
    return f'; it is used at {uses[0].line}' if uses else ''
