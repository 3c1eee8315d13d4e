"""A train step as it is called in a loop, partitioned by the plan of the state.

The layout of the batch follows from the batch of the first call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from partitioning.constraints import lay_out
from partitioning.partitioner.batches import batch_specs, has_rows
from partitioning.partitioner.initializing import check_only_arrays
from partitioning.programs.contexts import PjittedFnWithContext
from partitioning.programs.inner_layouts import is_resource
from partitioning.programs.partitioned_function import PartitionedCallable
from partitioning.programs.trace_log import Arguments, check_not_pmapped
from partitioning.state import path_str
from partitioning.state.static_arrays import AS_ARRAY_FIELD, find_static_tracers, name_static_field
from partitioning.state.structures import match_by_path
from partitioning.tracebacks import keep_user_frames
from partitioning.values import array_str, value_str

_LOGGER = logging.getLogger(__name__)


class TrainingSetup(NamedTuple):
    """What a training loop needs, from `PjitPartitioner.setup`.

    Attributes:
      state: the state, in its shards.
      step: the partitioned step. It takes what the user's step takes. The new state is laid out
        like the old one; further arguments and results are replicated. The first call raises
        ValueError if the result has no state with the same structure, shapes and dtypes, or if the
        data axes do not divide an array of the batch. `step.lower` and `step.eval_shape` see the
        result as a pair of the state and the rest.
      data_spec: the layout of the batch.
    """

    state: Any
    step: PartitionedCallable
    data_spec: Any


class Step(PjittedFnWithContext):
    """A partitioned step whose calls return what the step of the user returns.

    It has the attributes of the partitioned function.
    `partition` is `BasePartitioner.partition`, and `specs` are those of the state. `is_default`
    says that the user gave no `data_spec`.
    """

    def __init__(
        self,
        partition: Callable[..., PartitionedCallable],
        train_step: Callable[..., Any],
        specs: Any,
        data_spec: Any,
        mesh: Mesh,
        *,
        is_default: bool,
        static_argnums: int | Sequence[int],
        donate: bool,
    ):
        if not callable(train_step):
            raise ValueError(f'train_step must be a function, not {value_str(train_step)}')
        self._mesh, self._arguments = mesh, Arguments(train_step)
        arguments = self._arguments
        self._static = arguments.check_indices(static_argnums, 'static_argnums')
        if {0, 1} & {*self._static}:
            raise ValueError(
                f'{arguments.function}: static_argnums={static_argnums} names '
                f'{arguments.name(min(self._static))}, but the state and the batch are arrays'
            )
        if not arguments.unlimited and len(arguments.positional) < 2:
            takes = ', '.join(arguments.positional)
            raise ValueError(
                f'train_step must take (state, batch) by position, but {arguments.function} takes '
                f'({takes}): write a function of the state and the batch'
            )
        self._needed, self._defaults = _positional(arguments, self._static)
        # jax.jit has to know the layout of a result before it is traced. The function that is
        # compiled therefore always returns a pair of the state and the rest. If `train_step` itself
        # returns another form, that form is restored after every call.
        self._axes: tuple[str, ...] = ()  # of pmap, which the step uses

        def partition_for(data_spec: Any, position: int) -> PartitionedCallable:
            others = [i for i in range(1, self._needed) if i not in self._static]
            self._layout = data_spec, position
            return partition(
                returning_pairs(_bind_axes(train_step, self._axes), specs),
                (specs, *(data_spec if i == position else None for i in others)),
                (specs, None),
                static_argnums=self._static,
                donate_argnums=(0,) if donate else (),
            )

        self._partition_for, self._data_spec, self._specs = partition_for, data_spec, specs
        self._is_default, self._is_laid_out = is_default, False
        self._batch_name = arguments.name(1)
        self._structure: Any = None  # of the batch, if it has scalars
        self._pjitted_fn = partition_for(data_spec, 1)
        functools.update_wrapper(self, self._pjitted_fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_laid_out:
            self._lay_out_batch(args, kwargs)
        if len(args) != self._needed:
            args, kwargs = self._arrange(args, kwargs)
        try:  # which costs nothing unless an exception is raised
            pair = self._pjitted_fn(*args, **kwargs)
        except Exception as error:
            if self._bind_axis(error):
                return self(*args, **kwargs)
            self._check_structure(args, kwargs)
            keep_user_frames(error)
            raise
        return pair[1].with_state(pair[0]) if type(pair[1]) is _Rest else pair

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._lay_out_batch(args, kwargs)
        args, kwargs = self._arrange(args, kwargs)
        try:
            return getattr(self._pjitted_fn, method)(*args, **kwargs)
        except ValueError as error:
            if not self._bind_axis(error):
                raise
        return self._apply(method, args, kwargs)

    def _bind_axis(self, error: Exception) -> bool:
        """Binds an axis of pmap if the step has failed because it needs one."""
        axis = error.__dict__.get('unbound_axis')
        if axis is None or axis in self._axes:
            return False
        _LOGGER.warning(
            'in %s, the axis %r of pmap has size 1: a batch is global here, so that lax.pmean and '
            'lax.psum over devices have nothing to do',
            self._arguments.function,
            axis,
        )
        self._axes += (axis,)
        self._pjitted_fn = self._partition_for(*self._layout)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get('_pjitted_fn'), name)

    def for_arguments(self, *args: Any) -> PartitionedCallable:
        """The partitioned function, with the batch laid out as in a call with these arguments."""
        self._lay_out_batch(args, {})
        return self._pjitted_fn

    def _lay_out_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decides the layout of the batch, if that has not been done."""
        if self._is_laid_out:
            return
        given = self._arguments.by_name(args, kwargs)
        names = {i: self._arguments.name(i) for i in range(1, self._needed)}
        if names[1] not in given:
            return  # jax says that an argument is missing
        arrays = (i for i in names if i not in self._static and has_rows(given.get(names[i])))
        position = next(arrays, 1)
        name = names[position]
        if not self._is_state(given.get(self._arguments.name(0))) and self._is_state(given[name]):
            return  # they are in the wrong order, as the call says when it fails
        specs = batch_specs(
            given[name], self._data_spec, self._mesh, name, is_default=self._is_default
        )
        if specs is not self._data_spec or position != 1:
            self._pjitted_fn = self._partition_for(specs, position)
        if specs is not self._data_spec:
            self._structure = jax.tree.structure(given[name])
        self._batch_name = name
        self._is_laid_out = True

    def _is_state(self, value: Any) -> bool:
        return match_by_path(self._specs, value) is not None

    def _check_structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ValueError if scalars are laid out by a batch of another structure."""
        name = self._batch_name
        batch = self._arguments.by_name(args, kwargs).get(name)
        first, now = self._structure, jax.tree.structure(batch)
        if first is not None and first != now:
            raise ValueError(
                f'{self._arguments.function}: {name} has the structure {now}, but it was {first} '
                'in the first call, in which scalars were laid out: call setup again for this one'
            )

    def _arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, of which jax.jit takes as many by position as have a layout."""
        needed = self._needed
        if len(args) > needed:
            names = self._arguments.positional[needed : len(args)]
            if len(names) == len(args) - needed:
                kwargs = kwargs | dict(zip(names, args[needed:], strict=True))
                args = args[:needed]
        elif not kwargs and len(args) + len(self._defaults) >= needed:
            args = (*args, *self._defaults[len(self._defaults) + len(args) - needed :])
        return args, kwargs


def check_step_is_second(init: Any, train_step: Any, args: Sequence[Any]) -> None:
    """Raises ValueError if only the step, not the init function, takes the arguments of setup."""
    modules = hasattr(init, 'apply') or hasattr(train_step, 'apply')
    if modules or not callable(init) or not callable(train_step) or any(map(is_resource, args)):
        return
    first, second = Arguments(init), Arguments(train_step)
    if first.call_error(args, {}) and second.signature and not second.call_error(args, {}):
        raise ValueError(
            f'{first.function} does not take what follows the two functions, but {second.function} '
            'does: the init function comes first, as in '
            f'setup({second.function}, {first.function}, ...)'
        )


def _positional(arguments: Arguments, static: Sequence[int]) -> tuple[int, tuple[Any, ...]]:
    """The number of arguments that are passed by position, and the defaults of the last of them.

    jax.jit has to know how many there are. Those that have a default are passed by name, unless
    they come before a static argument.
    """
    if arguments.signature is None:  # of some functions
        return max([2, *(i + 1 for i in static)]), ()
    parameters = list(arguments.signature.parameters.values())[: len(arguments.positional)]
    least = sum(p.default is p.empty for p in parameters)
    needed = max(2, least, *(i + 1 for i in static))
    return needed, tuple(p.default for p in parameters[least:needed])


@functools.partial(jax.tree_util.register_dataclass, data_fields=['values'], meta_fields=['kind'])
@dataclasses.dataclass(frozen=True)
class _Rest:
    """A result without its state. Its kind is its type, such as list; None for only a state."""

    values: tuple[Any, ...]
    kind: type | None

    def with_state(self, state: Any) -> Any:
        """The result."""
        if self.kind is None:
            return state
        return getattr(self.kind, '_make', self.kind)((state, *self.values))


def _bind_axes(step: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    """A step for `jax.pmap` with axes of size 1, so that its collectives return what they get."""
    for axis in axes:
        step = _bind_axis(step, axis)
    return step


def _bind_axis(step: Callable[..., Any], axis: str) -> Callable[..., Any]:
    @functools.wraps(step)
    def bound(*args: Any, **kwargs: Any) -> Any:
        # Only what depends on lax.axis_index has the dimension of the axis before [0].
        result = jax.vmap(lambda _: step(*args, **kwargs), axis_name=axis)(jnp.zeros(1))
        return jax.tree.map(lambda x: x[0], result)

    return bound


def returning_pairs(train_step: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """`train_step` with a result of (state, rest), in which the state is as it was before."""
    check_not_pmapped(train_step)
    name = getattr(train_step, '__name__', 'train_step')

    @functools.wraps(train_step)
    def pair(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = train_step(state, *args, **kwargs)
        check_only_arrays(result, name)
        if find_static_tracers(result):
            raise ValueError(
                f'{name} puts an array that it computes into the static field '
                f'{name_static_field(result) or "of a node"}, but a static field is a constant of '
                f'the program: {AS_ARRAY_FIELD}, or change the state that {name} receives'
            )
        after, rest = _state_and_rest(result, state, name)
        of_each = match_by_path(specs, state)
        assert of_each is not None, 'jax has compared the structures already'
        leaves = zip(jax.tree.leaves(state), jax.tree.leaves(after), of_each, strict=True)
        # Each array has the layout and the dtype of the old one: a weak type would make jax compile
        # the second call separately. The rest is laid out because over Explicit axes, jax.jit moves
        # no results.
        arrays = [
            lay_out(jax.lax.convert_element_type(new, old.dtype), spec) for old, new, spec in leaves
        ]
        rest = jax.tree.map(lambda x: lay_out(x, None), rest)
        return jax.tree.unflatten(jax.tree.structure(state), arrays), rest

    return pair


def _state_and_rest(result: Any, state: Any, name: str) -> tuple[Any, Any]:
    """The state in the result of a step, and what comes after it.

    Raises ValueError if the result neither is nor begins with a state like the one before.
    """
    structure: Any = jax.tree.structure(state)

    def is_state(x: Any) -> bool:
        return bool(jax.tree.structure(x) == structure)

    if is_state(result):
        new, rest = result, _Rest((), None)
    elif isinstance(result, tuple | list) and result and is_state(result[0]):
        new, *others = result
        is_pair = type(result) is tuple and len(others) == 1
        rest = others[0] if is_pair else _Rest(tuple(others), type(result))
    else:
        returned, candidate = _kind(result), result
        if isinstance(result, tuple | list) and result:
            returned += f' of ({", ".join(map(_kind, result))})'
            candidate = result[0]
        raise ValueError(
            f'{name} returned {returned}, but must return the new state, or a tuple that begins '
            f'with it, such as (state, metrics). {_difference(candidate, state)}'
        )
    _check_same_arrays(new, state, name)
    return new, rest


def _check_same_arrays(after: Any, before: Any, name: str) -> None:
    """Raises ValueError if an array has another shape or dtype than before."""
    paths = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True):
        was, now = jax.typeof(old), jax.typeof(new)
        # A Python number takes the dtype of the state, but 0.5 does not become an integer.
        dtype = jnp.result_type(was.dtype, new) if now.weak_type else now.dtype
        if (was.shape, was.dtype) != (now.shape, dtype):
            raise ValueError(
                f'{name} returned {path_str(path) or "the state"} as {array_str(now)}, but '
                f'received {array_str(was)}, so each step would be compiled again: return it as '
                f'{array_str(was)}, or make it {array_str(now)} in the init function'
            )


def _kind(x: Any) -> str:
    """What a value is, in words: `a dict` or `float32[8]`."""
    return array_str(jax.typeof(x)) if jax.tree_util.all_leaves([x]) else f'a {type(x).__name__}'


def _difference(candidate: Any, state: Any) -> str:
    """How the structures of a result and of the state differ."""
    after, before = (
        [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (candidate, state)
    )
    if lacks := [path for path in before if path not in after]:
        return f'It lacks {len(lacks)} of {len(before)} arrays of the state, first {lacks[0]}'
    if adds := [path for path in after if path not in before]:
        return f'The state had no {adds[0]}: create it in the init function'
    return (
        f'The arrays are the same as in the state, a {type(state).__name__}, but the containers or '
        'the static fields differ: change the state that the step receives, as state.replace(...) '
        'does'
    )
