"""What the code of a traced function says: constraints, checkpoints, and types of its arithmetic.

Everything is counted as often as it is executed, so a loop over layers and the same layers written
one after the other have the same facts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import linecache
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from meshwright.jaxpr.primitives import CHECKPOINTS, CONSTRAINTS, PSUMS, names_in
from meshwright.jaxpr.values import is_backward
from meshwright.jaxpr.writing_out import spec_axes
from meshwright.records.arithmetic import arithmetic_of
from meshwright.records.record import (
    At,
    RecordedCheckpoint,
    RecordedCollective,
    RecordedConstraint,
    RecordedPrecision,
)
from meshwright.user_lines import (
    find_helpers,
    is_library,
    short_source,
    stack_of_traceback,
    user_line,
)
from partitioning.products.flops import (
    RECOMPUTED,
    bodies_of,
    count_runs,
    open_jaxpr,
)
from partitioning.rules import from_tuple, spec_str

# The names of some have changed between versions of jax.
_COLLECTIVES = {name: name for name in names_in('pmax pmin ppermute all_gather all_to_all')}
_COLLECTIVES |= dict.fromkeys(PSUMS, 'psum')
_COLLECTIVES |= {'all_gather_invariant': 'all_gather', 'reduce_scatter': 'psum_scatter'}
_COLLECTIVES |= {'psum_scatter': 'psum_scatter', 'ragged_all_to_all': 'ragged_all_to_all'}
_MOST_LINES = 16  # of one kind
_CALLERS = 3  # lines of each call stack
_LONGEST = 80  # characters of a line

_Key = TypeVar('_Key', str, tuple[Any, ...])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedFacts:
    """What the code of a function says.

    Attributes:
      constraints, collectives, checkpoints, precisions, loops: as in a `Record`.
      files: the files of the user's whose lines the function has, as paths.
    """

    constraints: tuple[RecordedConstraint, ...]
    collectives: tuple[RecordedCollective, ...]
    checkpoints: tuple[RecordedCheckpoint, ...]
    precisions: tuple[RecordedPrecision, ...]
    loops: tuple[int, ...]
    files: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _Executed:
    """An equation, with how often it is executed, and the lines and the path of what calls it."""

    equation: Any
    times: int
    around: tuple[str, ...] = ()
    outer: str = ''

    @property
    def path(self) -> str:
        """The names of the transformations and scopes around it."""
        return f'{self.outer}/{self.equation.source_info.name_stack}'

    @property
    def is_forward(self) -> bool:
        """Whether it is a part of what the code says, and not of what jax derives from it."""
        return not is_backward(self.path) and RECOMPUTED not in self.path

    @property
    def stack(self) -> tuple[str, ...]:
        """The 'file:line' of the code and of its callers, innermost first."""
        return stack_of_traceback(self.equation.source_info.traceback) or self.around


def find_facts(jaxpr: Any, sizes: Mapping[str, int]) -> TracedFacts:
    """Reads what the code of a function says.

    Args:
      jaxpr: its ClosedJaxpr.
      sizes: the size of each mesh axis. Axes of size 1 divide nothing, and are left out.
    """
    executed = [*_walk(jaxpr, 1)]
    files = {
        line.rpartition(':')[0]
        for one in executed
        for line in one.stack
        if line and not is_library(line)
    }
    return TracedFacts(
        constraints=tuple(_constraints(executed, sizes)),
        collectives=tuple(_collectives(executed)),
        checkpoints=tuple(_checkpoints(executed)),
        precisions=tuple(_precisions(executed)),
        loops=tuple(sorted(_loops(executed))),
        files=frozenset(files),
    )


def place_of(line: str, why: str = '', rule: str = '') -> At:
    """A 'file:line' with what the line says."""
    return At(line=short_source(line), text=_text_of(line), why=why, rule=rule)


@functools.cache
def _text_of(line: str) -> str:
    path, _, number = line.rpartition(':')
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ''
    return text if len(text) <= _LONGEST else f'{text[: _LONGEST - 3]}...'


def _walk(
    jaxpr: Any, times: int, around: tuple[str, ...] = (), outer: str = ''
) -> Iterator[_Executed]:
    for equation in open_jaxpr(jaxpr)[0].eqns:
        one = _Executed(equation, times, around, outer)
        yield one
        for body in bodies_of(equation):
            yield from _walk(body, times * count_runs(equation), one.stack, one.path)


def _constraints(
    executed: Sequence[_Executed], sizes: Mapping[str, int]
) -> Iterator[RecordedConstraint]:
    stated = [
        (
            one,
            one.equation.params[
                'sharding' if 'sharding' in one.equation.params else 'dst_sharding'
            ],
        )
        for one in executed
        if one.equation.primitive.name in CONSTRAINTS and one.is_forward
    ]
    helpers = find_helpers([(one.stack, str(sharding)) for one, sharding in stated])
    found = []
    for one, sharding in stated:
        shape = tuple(one.equation.outvars[0].aval.shape)
        if not hasattr(sharding, 'spec') or not shape:
            continue
        key = shape, _spec_str(sharding.spec, len(shape), sizes)
        own = [line for line in one.stack if not is_library(line) and line not in helpers]
        found.append((key, one.times, own[:_CALLERS]))
    for (shape, spec), count, at in _add_up(found):
        yield RecordedConstraint(shape=shape, spec=spec, count=count, at=at)


def _add_up(
    found: Iterable[tuple[_Key, int, Sequence[str]]],
) -> Iterator[tuple[_Key, int, tuple[At, ...]]]:
    """What is executed, by its key: how often, and at which lines.

    Args:
      found: each key with how often it is executed, and the stack of its lines.
    """
    counts: collections.Counter[_Key] = collections.Counter()
    stacks: dict[_Key, list[Sequence[str]]] = collections.defaultdict(list)
    for key, times, stack in found:
        counts[key] += times
        stacks[key].append(stack)
    for key in sorted(counts):
        yield key, counts[key], _places(stacks[key])


def _places(stacks: Sequence[Sequence[str]]) -> tuple[At, ...]:
    """The lines of several stacks: first the innermost of each, then those that call these."""
    ordered = [line for level in itertools.zip_longest(*stacks) for line in level if line]
    return tuple(place_of(line) for line in list(dict.fromkeys(ordered))[:_MOST_LINES])


def _loops(executed: Sequence[_Executed]) -> Iterator[int]:
    for one in executed:
        if one.equation.primitive.name in ('scan', 'while') and one.is_forward:
            yield count_runs(one.equation)


def _spec_str(spec: Any, rank: int, sizes: Mapping[str, int]) -> str:
    """A layout as code, with an entry for each dimension."""
    open_entries = [entry is not None and not isinstance(entry, str | tuple) for entry in spec]
    axes = spec_axes(spec, rank, sizes)
    text = spec_str(jax.sharding.PartitionSpec(*(from_tuple(a or ()) for a in axes)))
    open_at = [str(i) for i, is_open in enumerate(open_entries) if is_open]
    return f'{text}, open in {", ".join(open_at)}' if open_at else text


def _collectives(executed: Sequence[_Executed]) -> Iterator[RecordedCollective]:
    found = []
    for one in executed:
        name = _COLLECTIVES.get(one.equation.primitive.name)
        if name is None or not one.is_forward:
            continue
        params = one.equation.params
        given = params.get('axes', params.get('axis_name', ()))
        axes = given if isinstance(given, tuple | list) else (given,)
        key = name, tuple(str(axis) for axis in axes), _partners(params)
        own = [line for line in one.stack if not is_library(line)]
        found.append((key, one.times, own[:_CALLERS]))
    for (name, axes, partners), count, at in _add_up(found):
        yield RecordedCollective(name=name, axes=axes, count=count, at=at, partners=partners)


def _partners(params: Mapping[str, Any]) -> str:
    """Which devices exchange with which, if not all along the axes."""
    if groups := params.get('axis_index_groups'):
        return f'groups {", ".join(" ".join(map(str, group)) for group in groups)}'
    pairs = enumerate(sorted(params.get('perm') or ()))
    shown = []
    # Devices one after the other whose partners are equally far away.
    for (shift, _), found in itertools.groupby(
        pairs, lambda x: (x[1][1] - x[1][0], x[1][0] - x[0])
    ):
        sources = [source for _, (source, _) in found]
        span = f'{sources[0]}-{sources[-1]}' if len(sources) > 1 else f'{sources[0]}'
        shown.append(f'{span} by {shift:+}')
    return ', '.join(shown)


def _checkpoints(executed: Sequence[_Executed]) -> Iterator[RecordedCheckpoint]:
    found = []
    for one in executed:
        if one.equation.primitive.name in CHECKPOINTS:
            policy = _policy_name(one.equation.params.get('policy'))
            defined = [_defined_at(body) for body in bodies_of(one.equation)]
            found.append((policy, one.times, [user_line(one.stack), *filter(None, defined)]))
    if found:  # the names of values matter to policies only
        for one in executed:
            if one.equation.primitive.name == 'name' and one.is_forward:
                name = f"name '{one.equation.params['name']}'"
                found.append((name, one.times, [user_line(one.stack)]))
    for policy, count, at in _add_up(found):
        yield RecordedCheckpoint(policy=policy, count=count, at=at)


def _defined_at(jaxpr: Any) -> str:
    """The 'file:line' of the function that a jaxpr was traced from, or ''."""
    text = str(getattr(open_jaxpr(jaxpr)[0].debug_info, 'func_src_info', '') or '')
    return text.rpartition(' at ')[2] if ' at ' in text else ''


def _policy_name(policy: Any) -> str:
    """The name of a policy of jax with what it was made of; policies of others have no name."""
    if policy is None:
        return 'nothing_saveable'
    known = vars(jax.checkpoint_policies).items()
    if (name := next((n for n, value in known if value is policy), None)) is not None:
        return name
    name = getattr(policy, '__qualname__', type(policy).__qualname__).partition('.<locals>')[0]
    name = re.sub(r'(?<=[a-z])(?=[A-Z])', '_', name).lower()  # some versions of jax have classes
    if not str(getattr(policy, '__module__', '')).startswith('jax'):
        return 'a policy of the program'
    held = [cell.cell_contents for cell in getattr(policy, '__closure__', None) or ()]
    held += vars(policy).values() if hasattr(policy, '__dict__') else ()
    given = sorted(str(x) for value in held for x in _texts_in(value))
    return f'{name}({", ".join(given)})' if given else name


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (x for x in value if isinstance(x, str))


def _precisions(executed: Sequence[_Executed]) -> Iterator[RecordedPrecision]:
    amounts: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(
        lambda: collections.defaultdict(float)
    )
    for one in executed:
        if (found := arithmetic_of(one.equation)) is not None:
            family, dtype, amount = found
            if family != 'products' and not one.is_forward:
                continue
            amounts[family, dtype][user_line(one.stack)] += amount * one.times
    for (family, dtype), lines in sorted(amounts.items()):
        most = sorted(lines, key=lambda line: -lines[line])[:_MOST_LINES]
        at = tuple(map(place_of, most))
        total = math.fsum(lines.values())
        yield RecordedPrecision(family=family, dtype=dtype, amount=total, at=at)
