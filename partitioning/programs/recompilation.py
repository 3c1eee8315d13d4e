"""Why a partitioned function was compiled again: the argument that changed, before and after.

A function is traced whenever jax meets arguments of a new kind. `TraceLog` keeps the abstract
arguments of the first and of the latest trace, so it costs nothing at a call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax

from partitioning.programs.arguments import Arguments, positions
from partitioning.programs.tree_matching import TreeMismatchError, pair_leaves, short_repr
from partitioning.rules import describe_axes, spec_str

OnRecompile = Literal['allow', 'error']


class RecompilationError(ValueError):
    """A partitioned function would be compiled again, under the policy 'error'."""


@dataclasses.dataclass(frozen=True)
class StaticValue:
    """A static argument in the record of a trace."""

    value: Any


class Change(NamedTuple):
    """A difference between two traces, and what to write instead."""

    text: str
    hint: str


class TraceLog:
    """The traces of one partitioned function.

    Args:
      arguments: the arguments of the function.
      static: the positions of its static arguments.
      on_recompile: what is done when the function is traced again: 'allow' or 'error'.

    Attributes:
      count: the number of traces.
      result: the abstract result of the latest trace.

    Raises:
      ValueError: if the policy does not exist.
    """

    def __init__(self, arguments: Arguments, static: Sequence[int], on_recompile: OnRecompile):
        if on_recompile not in get_args(OnRecompile):
            raise ValueError(f"on_recompile must be 'allow' or 'error', not {on_recompile!r}")
        self._arguments, self._static = arguments, static
        self.on_recompile = on_recompile
        self.clear()

    def clear(self) -> None:
        """Forgets every trace."""
        self.count = 0
        self.result: Any = None
        self._first: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._layouts: dict[Any, list[dict[str, Any]]] = {}
        self._relayouts: list[Change] = []

    @property
    def num_compilations(self) -> int:
        """One per trace, and one per further layout of keyword arguments without an entry."""
        return self.count + len(self._relayouts)

    def start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Records the arguments of a trace.

        Raises:
          RecompilationError: if it is not the first trace, and the policy is 'error'.
        """
        static = {self._arguments.name(i) for i in positions(self._static, len(args))}
        traced = {
            name: StaticValue(value) if name in static else jax.tree.map(abstract, value)
            for name, value in self._arguments.by_name(args, kwargs).items()
        }
        if self.count and self.on_recompile == 'error':
            raise RecompilationError(self._describe(_changes(self._first, traced)))
        self._latest = traced
        if not self.count:
            self._first = traced

    def finish(self, result: Any) -> None:
        """Records the result of a trace."""
        self.count += 1
        self.result = jax.tree.map(abstract, result)

    def forget_latest(self) -> None:
        """Forgets the latest trace, whose result jax has refused."""
        self.count -= 1

    def check_layouts(self, keywords: Mapping[str, Any]) -> None:
        """Raises RecompilationError if a call would be compiled again for the layout of keywords.

        Args:
          keywords: arguments without an entry in in_axis_resources.
        """
        known = self._layouts.get(_kind(keywords), [])
        if known and (layouts := _layouts(keywords)) not in known:
            raise RecompilationError(self._describe([_relayout(known[0], layouts)]))

    def record_layouts(self, keywords: Mapping[str, Any], *, traced: bool) -> None:
        """Records the layouts of keyword arguments, for which jax compiles without a trace.

        Args:
          keywords: arguments without an entry in in_axis_resources.
          traced: whether the call was traced; its compilation is then counted already.
        """
        known = self._layouts.setdefault(_kind(keywords), [])
        if (layouts := _layouts(keywords)) not in known:
            if known and not traced:
                self._relayouts.append(_relayout(known[0], layouts))
            known.append(layouts)

    def describe(self) -> str:
        """Why there was more than one compilation."""
        changes = list(_changes(self._first, self._latest)) if self.count > 1 else self._relayouts
        name, count = self._arguments.function, self.num_compilations
        return f'{name} was compiled {count} times instead of once: {_joined(changes)}'

    def _describe(self, changes: Sequence[Change] | Iterator[Change]) -> str:
        name = self._arguments.function
        return f"{name} would be compiled again (on_recompile='error'): {_joined(list(changes))}"


def observe(fn: Callable[..., Any], trace_log: TraceLog) -> Callable[..., Any]:
    """`fn`, which jax runs only to trace it, with a record of its arguments and its result."""

    @functools.wraps(fn)
    def observed(*args: Any, **kwargs: Any) -> Any:
        trace_log.start(args, kwargs)
        result = call_function(fn, args, kwargs)
        trace_log.finish(result)
        return result

    return observed


def call_function(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function while it is traced. In a traceback, the frames below this are the user's."""
    return fn(*args, **kwargs)


def abstract(x: Any) -> Any:
    """The abstract value of an array: its shape, dtype, weak type, and layout on Explicit axes."""
    try:
        return jax.typeof(x)
    except TypeError:
        return x


def check_compiled_once(partitioned: Callable[..., Any]) -> None:
    """Checks that a partitioned function was compiled exactly once.

    Raises:
      ValueError: if it was never compiled, or if it was compiled again; the message names the
        argument that changed, before and after.
    """
    if not hasattr(partitioned, '_partitioned'):
        raise ValueError(
            f'{partitioned!r} must be a function that PjitPartitioner.partition returned'
        )
    function = partitioned._partitioned
    count = function.num_compilations()
    if not count:
        name = getattr(partitioned, '__name__', 'the function')
        raise ValueError(f'{name} was compiled 0 times instead of once: call it first')
    if count > 1:
        raise ValueError(function.trace_log.describe())


def _joined(changes: Sequence[Change]) -> str:
    if not changes:
        return (
            'its arguments are equal, so a jax setting, a mesh context or a cleared cache changed '
            'between the calls'
        )
    others = len(changes) - 1
    more = f' (and {others} more {"change" if others == 1 else "changes"})' if others else ''
    return f'{changes[0].text}{more}. {changes[0].hint}'


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """What differs between the arguments of two traces."""
    same = 'Pass the same arguments in every call, either by position or by name'
    for name in {**before, **after}:
        if name not in after:
            yield Change(f'{name} was given and is now left out', same)
        elif name not in before:
            yield Change(f'{name} was left out and is now given', same)
        elif isinstance(before[name], StaticValue) or isinstance(after[name], StaticValue):
            yield from _static_changes(name, before[name], after[name])
        else:
            yield from _array_changes(name, before[name], after[name])


def _static_changes(name: str, before: StaticValue, after: StaticValue) -> Iterator[Change]:
    if before == after:
        return
    one, other = short_repr(before.value), short_repr(after.value)
    if one == other:
        yield Change(
            f'the static argument {name} is another object in each call, not equal to the first, '
            f'{one}',
            'Create it once, or give its class __eq__ and __hash__',
        )
        return
    yield Change(
        f'the static argument {name} changed from {one} to {other}',
        f'Pass {name} as an array, or partition one function for each of its values',
    )


def _array_changes(name: str, before: Any, after: Any) -> Iterator[Change]:
    try:
        for path, one, other in pair_leaves(before, after):
            if one != other:
                yield _leaf_change(f'{name}{jax.tree_util.keystr(path)}', one, other)
    except TreeMismatchError as error:
        where = f'{name}{jax.tree_util.keystr(error.path)}'
        yield Change(
            f'{where} had {error.first} and now has {error.second}',
            'Pass trees of one structure in every call',
        )


def _leaf_change(where: str, before: Any, after: Any) -> Change:
    one, other = _array_str(before), _array_str(after)
    changed = f'{where} changed from {one} to {other}'
    if before.shape != after.shape:
        return Change(changed, 'Pass one shape in every call: pad or drop the last batch')
    if before.dtype != after.dtype:
        return Change(changed, f"Convert it before the call, with x.astype('{before.dtype}')")
    if before.weak_type != after.weak_type:
        return Change(
            changed, f"A Python number is weakly typed: write jnp.asarray(x, '{before.dtype}')"
        )
    layouts = ' to '.join(_abstract_layout_str(x.sharding) for x in (before, after))
    return Change(
        f'{where}, {one}, changed its layout from {layouts}',
        'Put it there before the first call, as jax.device_put(state, plan.shardings) does',
    )


def _abstract_layout_str(sharding: Any) -> str:
    """The layout that is part of an array's type: the mesh, and the spec on Explicit axes."""
    if sharding.mesh.empty:
        return 'no mesh (such as a numpy array)'
    return f'{spec_str(sharding.spec)} over {describe_axes(sharding.mesh)}'


def _array_str(aval: Any) -> str:
    """The kind of an array: `float32[8, 16]`."""
    weak = 'weakly typed ' if getattr(aval, 'weak_type', False) else ''
    return f'{weak}{aval.dtype}{list(aval.shape)}'


def _kind(keywords: Mapping[str, Any]) -> Any:
    """What jax traces keyword arguments for."""
    leaves, treedef = jax.tree.flatten(dict(keywords))
    return treedef, tuple(map(abstract, leaves))


def _layouts(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The sharding of each keyword array that has been put somewhere, by its path."""
    return {
        f'{name}{jax.tree_util.keystr(path)}': x.sharding
        for name, tree in keywords.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(x, 'committed', False)
    }


def _relayout(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    where = next(k for k in {**before, **after} if before.get(k) != after.get(k))
    one, other = (_layout_str(layouts.get(where)) for layouts in (before, after))
    return Change(
        f'the keyword argument {where} changed its layout from {one} to {other}',
        'Give the argument an entry in in_axis_resources, which fixes its layout',
    )


def _layout_str(sharding: Any) -> str:
    spec = getattr(sharding, 'spec', None)
    if sharding is None:
        return 'none'
    return str(sharding) if spec is None else spec_str(spec)
