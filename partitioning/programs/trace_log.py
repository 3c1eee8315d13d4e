"""The arguments of a partitioned function, and the record of its traces.

A function is traced whenever jax meets arguments of a new kind. `TraceLog` keeps the abstract
arguments of the first and of the latest trace, so it costs nothing at a call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
from jax.sharding import PartitionSpec, Sharding

from partitioning.hardware import is_pmapped
from partitioning.rules import nearest
from partitioning.state.structures import StaticValue
from partitioning.values import value_str

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positions(indices: Sequence[int], count: int) -> set[int]:
    """Indices of arguments, some counted from the last one, as positions in a call with `count`.

    Arguments that the call leaves out have no position.
    """
    return {i + count if i < 0 else i for i in indices if -count <= i < count}


class Arguments:
    """What a function accepts: the names of its positional parameters, or any number of arguments.

    The signature is None if Python does not know it, as for some C functions.

    Raises:
      ValueError: if `fn` cannot be called.
    """

    def __init__(self, fn: Callable[..., Any]):
        if not callable(fn):
            called = '' if isinstance(fn, str) else ': pass the function itself, without calling it'
            raise ValueError(
                f'the first argument of partition must be a function, not {value_str(fn)}{called}'
            )
        named = fn
        while isinstance(named, functools.partial):
            named = named.func
        self.function = getattr(named, '__name__', type(named).__name__)
        check_not_pmapped(named)
        self.signature: inspect.Signature | None = None
        with contextlib.suppress(TypeError, ValueError):
            self.signature = inspect.signature(fn)
        parameters = [] if self.signature is None else list(self.signature.parameters.values())
        self.positional = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
        variable = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
        self.unlimited = self.signature is None or bool(variable)
        self._rest = variable[0] if variable else 'args'

    def name(self, index: int) -> str:
        """The name of the positional argument at an index."""
        if index < len(self.positional):
            return self.positional[index]
        return f'{self._rest}[{index - len(self.positional)}]'

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {self.name(i): value for i, value in enumerate(args)} | dict(kwargs)

    def call_error(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
        """The error of a call that does not fit the signature, or None if it fits."""
        if self.signature is None:
            return None
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            known = self.signature.parameters
            # Annotations can be long.
            bare = inspect.Signature([p.replace(annotation=p.empty) for p in known.values()])
            text, hint = str(error), ''
            unknown = [name for name in kwargs if name not in known]
            if unknown and all(p.kind is not p.VAR_KEYWORD for p in known.values()):
                text = f'got an unexpected keyword argument {unknown[0]!r}'
                hint = nearest(unknown[0], known)
            signature = f'{self.function}{bare}'
            return TypeError(f'{self.function}() {text}; its signature is {signature}.{hint}')
        return None

    def check_indices(self, indices: int | Sequence[int], setting: str) -> tuple[int, ...]:
        """The positions that a setting, such as 'donate_argnums', names from the first argument on.

        Raises:
          ValueError: if an index is not an integer, or if the function has no such argument.
        """
        count = len(self.positional)
        indices = (indices,) if isinstance(indices, int) else tuple(indices)
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool):
                raise ValueError(
                    f'{self.function}: {setting} must be the positions of arguments, such as 0, '
                    f'not {index!r}'
                )
            if not self.unlimited and not -count <= index < count:
                listed = ', '.join(f'{name} ({i})' for i, name in enumerate(self.positional))
                raise ValueError(
                    f'{self.function}: {setting}={index} is out of range: it has {count} '
                    f'positional arguments, {listed or "none"}'
                )
        if self.unlimited:
            return tuple(indices)
        return tuple(index % count for index in indices)


def check_not_pmapped(fn: Callable[..., Any]) -> None:
    """Raises ValueError if a function is the result of `jax.pmap`."""
    if is_pmapped(fn):
        name = getattr(fn, '__name__', 'the function')
        raise ValueError(
            f'{name} is a jax.pmap object, which takes arrays with a dimension of devices, but '
            'arrays in a partitioned function are global: pass its `.__wrapped__`, or remove '
            'jax.pmap. If it calls lax.pmean or lax.psum, setup takes it as it is; for partition, '
            "pass jax.vmap(fn.__wrapped__, None, None, axis_name='batch', axis_size=1)"
        )


def check_init(init: Any, args: Sequence[Any], write: str = '({}, {})') -> None:
    """Raises ValueError if a function that makes a state does not take these arguments.

    `write` is the call in which both are passed.
    """
    if all(callable(getattr(init, name, None)) for name in ('init', 'apply')):
        call = write.format('model.init', 'key, x')
        raise ValueError(
            f'{type(init).__name__} is a module, not a function that makes a state: write {call}'
        )
    for i, arg in enumerate(args):
        if isinstance(arg, PartitionSpec | Sharding):
            raise ValueError(
                f'argument {i + 1} of the init function is {arg}, a layout and no array: '
                'the layout of a batch is setup(..., data_spec=...)'
            )
    arguments = Arguments(init)
    if arguments.signature is None:
        return
    try:
        arguments.signature.bind(*args)
    except TypeError as error:
        empty = inspect.Parameter.empty
        known = arguments.signature.parameters.values()
        needed = [p.name for p in known if p.kind in _POSITIONAL and p.default is empty]
        takes = ', '.join(arguments.positional)
        call = write.format(arguments.function, ', '.join(needed)).replace(', )', ')')
        raise ValueError(
            f'{arguments.function}({takes}) got {len(args)} arguments ({error}): write {call}'
        ) from None


OnRecompile = Literal['allow', 'error']
# The sharding of each keyword array that has been put somewhere, by its path.
Layouts = dict[str, Any]


# The result of a trace that has not ended: the function may have failed, or jax.
NO_RESULT = object()


class RecompilationError(ValueError):
    """A partitioned function would be compiled again, under the policy 'error'."""


class TraceLog:
    """The traces of one partitioned function.

    Attributes:
      count: the number of traces.
      result: the abstract result of the latest trace, or NO_RESULT if it has not ended.
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
        self.result: Any = NO_RESULT
        self._first: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._layouts: dict[Any, list[Layouts]] = {}
        self._relayouts: list[tuple[Layouts, Layouts]] = []

    @property
    def num_compilations(self) -> int:
        """One per trace, and one per further layout of keyword arguments without an entry."""
        return self.count + len(self._relayouts)

    def start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Records the arguments of a trace; under 'error', a second one is a RecompilationError."""
        self.result = NO_RESULT
        static = {self._arguments.name(i) for i in positions(self._static, len(args))}
        traced = {
            name: StaticValue(value) if name in static else jax.tree.map(abstract, value)
            for name, value in self._arguments.by_name(args, kwargs).items()
        }
        if self.count and self.on_recompile == 'error':
            raise RecompilationError(self._refusal(self._first, traced))
        self._latest = traced
        if not self.count:
            self._first = traced

    def finish(self, result: Any) -> None:
        """Records the result of a trace."""
        self.count += 1
        self.result = jax.tree.map(abstract, result)

    def check_layouts(self, keywords: Mapping[str, Any]) -> None:
        """Raises RecompilationError if the layout of keywords would cause another compilation."""
        known = self._layouts.get(_kind(keywords), [])
        if known and (layouts := _layouts(keywords)) not in known:
            raise RecompilationError(self._refusal(known[0], layouts))

    def record_layouts(self, keywords: Mapping[str, Any], *, traced: bool) -> None:
        """Records the layouts of keyword arguments, for which jax compiles without a trace.

        The compilation of a call that was traced is counted already.
        """
        known = self._layouts.setdefault(_kind(keywords), [])
        if (layouts := _layouts(keywords)) not in known:
            if known and not traced:
                self._relayouts.append((known[0], layouts))
            known.append(layouts)

    def describe(self) -> str:
        """Why there was more than one compilation."""
        from partitioning.programs.explaining.changed_arguments import describe_changes

        pairs = [(self._first, self._latest)] if self.count > 1 else self._relayouts
        name, count = self._arguments.function, self.num_compilations
        return f'{name} was compiled {count} times instead of once: {describe_changes(pairs)}'

    def _refusal(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
        from partitioning.programs.explaining.changed_arguments import describe_changes

        changes, name = describe_changes([(before, after)]), self._arguments.function
        return f"{name} would be compiled again (on_recompile='error'): {changes}"


def observe(
    fn: Callable[..., Any], trace_log: TraceLog, check: Callable[[Any], None]
) -> Callable[..., Any]:
    """`fn`, which jax runs only to trace it, with a record of its arguments and checked result."""

    @functools.wraps(fn)
    def observed(*args: Any, **kwargs: Any) -> Any:
        trace_log.start(args, kwargs)
        result = call_function(fn, args, kwargs)
        trace_log.finish(result)
        check(result)
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
    function: Any = partitioned
    log = getattr(function, 'trace_log', None)
    if not isinstance(log, TraceLog):
        raise ValueError(
            f'{value_str(partitioned)} must be a function that PjitPartitioner.partition or setup '
            'returned: pass that one, and not the function that it was made from'
        )
    count = function.num_compilations()
    if not count:
        name = getattr(partitioned, '__name__', 'the function')
        raise ValueError(f'{name} was compiled 0 times instead of once: call it first')
    if count > 1:
        raise ValueError(log.describe())


def _kind(keywords: Mapping[str, Any]) -> Any:
    """What jax traces keyword arguments for."""
    leaves, treedef = jax.tree.flatten(dict(keywords))
    return treedef, tuple(map(abstract, leaves))


def _layouts(keywords: Mapping[str, Any]) -> Layouts:
    return {
        f'{name}{jax.tree_util.keystr(path)}': x.sharding
        for name, tree in keywords.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(x, 'committed', False)
    }
