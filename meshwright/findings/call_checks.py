"""Checks of what happens between two calls: recompilation, and memory that is held twice."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding, Sharding

from meshwright.findings.program_facts import ProgramFacts
from meshwright.jaxpr.writing_out import spec_axes
from meshwright.user_lines import is_library
from partitioning.amounts import bytes_str, bytes_strs
from partitioning.plan.findings import Finding
from partitioning.rules import sharding_str

_LEAST_UNDONATED = 2**14  # bytes of a device


def find_changed_layouts(facts: ProgramFacts) -> Iterator[Finding]:
    """Arrays of a state that come back with another sharding, so that the next call compiles."""
    found: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for number, i in sorted(facts.pairs.items(), key=lambda pair: pair[1]):
        before, after = facts.traced.arguments[i], facts.results[number]
        aval = facts.traced.jaxpr.in_avals[i]
        if not isinstance(after, Sharding) or not facts.sizes:
            continue
        if before is None:
            if facts.traced.uncommitted[i] or aval.weak_type:
                found['not laid out', sharding_str(after)].append(i)
        elif not _are_equal(before, after, len(aval.shape), facts.sizes):
            found[f'laid out by {sharding_str(before)}', sharding_str(after)].append(i)
    for (before, after), group in found.items():
        more = f'with {len(group) - 1} more, ' if len(group) > 1 else ''
        held = _held_twice(facts, group)
        if before == 'not laid out':
            held = ''  # the compiler chooses a layout for it, such as the one of the result
            what = (
                'put it on the mesh before the first call: jax.device_put(x, NamedSharding(mesh, '
                f'{after.partition(" over ")[0]}))'
            )
        else:
            what = f'write that sharding in out_shardings, or lay it out by {after} from the start'
        yield Finding(
            'warning',
            'changed layout',
            facts.path(group[0]),
            f'{more}it is {before} when the function is called, and laid out by {after} in its '
            f'result, so the next call compiles again{held}; {what}',
        )


def _held_twice(facts: ProgramFacts, group: Sequence[int]) -> str:
    """What arrays hold that come back with shards of another size; donating them frees nothing."""
    numbers = {i: number for number, i in facts.pairs.items()}
    held, returned = sum(map(facts.shard_bytes, group)), 0
    for i in group:
        aval, after = facts.traced.jaxpr.in_avals[i], facts.results[numbers[i]]
        returned += math.prod(after.shard_shape(aval.shape)) * aval.dtype.itemsize
    if abs(held - returned) < _LEAST_UNDONATED:
        return ''
    first, second = bytes_strs(held, returned)
    donated = all(facts.traced.donated[i] for i in group)
    reused = ': the memory of donated arrays is reused only for shards of their size'
    return f', and each device holds {first} and then {second}{reused if donated else ""}'


def find_changed_types(facts: ProgramFacts) -> Iterator[Finding]:
    """Arrays of a state that come back with another type, so that the next call compiles."""
    for number, i in sorted(facts.pairs.items(), key=lambda pair: pair[1]):
        before, after = facts.traced.jaxpr.in_avals[i], facts.traced.jaxpr.out_avals[number]
        if before.dtype != after.dtype:
            yield Finding(
                'warning',
                'changed type',
                facts.path(i),
                f'it is {before.dtype} when the function is called and {after.dtype} in its '
                f"result, so the next call compiles again; return x.astype('{before.dtype}')",
            )
        elif before.weak_type != after.weak_type:
            types = [_type_str(aval) for aval in (before, after)]
            strong = 'it in the result' if after.weak_type else 'it before the first call'
            yield Finding(
                'warning',
                'weak type',
                facts.path(i),
                f'it is {types[0]} when the function is called and {types[1]} in its result, so '
                f"the next call compiles again; make {strong} jnp.asarray(x, '{before.dtype}')",
            )


def find_undonated(facts: ProgramFacts) -> Iterator[Finding]:
    """A state that is not donated, so that the old and the new one are in memory at once."""
    kept = sorted(i for i in facts.pairs.values() if not facts.traced.donated[i])
    nbytes = sum(map(facts.shard_bytes, kept))
    if nbytes < _LEAST_UNDONATED:
        return
    names = list(dict.fromkeys(facts.argument(i) for i in kept))
    how = f'donate_argnames={names!r} in jax.jit or nnx.jit'
    if is_library(facts.line):  # of a wrapper
        how = 'donate= in eqx.filter_jit'
    yield Finding(
        'warning',
        'not donated',
        ', '.join(names) if is_library(facts.line) else facts.line,
        f'{facts.traced.name} returns a new {" and ".join(names)} and keeps the old, which is '
        f'{bytes_str(nbytes)} more on each device; donate what the caller no longer needs: {how}',
    )


def _are_equal(before: Any, after: Any, rank: int, sizes: Any) -> bool:
    if isinstance(before, NamedSharding) and isinstance(after, NamedSharding):
        one, other = (spec_axes(x.spec, rank, sizes) for x in (before, after))
        if [axes or () for axes in one] == [axes or () for axes in other]:
            return True
    try:  # the axes of two meshes may say the same
        return bool(before.is_equivalent_to(after, rank))
    except (TypeError, ValueError):  # of other devices
        return False


def _type_str(aval: Any) -> str:
    return f'weakly typed {aval.dtype} (a Python number)' if aval.weak_type else str(aval.dtype)
