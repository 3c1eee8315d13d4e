"""The cause of a failed call: one message of our own, in place of a long traceback of jax.

The arguments are inspected. If that finds the cause, the caller gets one ValueError; otherwise the
exception of jax or of the user's function passes through unchanged.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from partitioning.constraints import explain_batched_axis
from partitioning.hardware.compilers import explain_compiler_error
from partitioning.library_files import is_own_error
from partitioning.programs.boundary import Boundary, deletion_problems
from partitioning.programs.explaining.misfits import (
    device_problems,
    entry_problems,
    fit_problems,
    layout_problems,
    pmap_hint,
    result_problems,
    shard_hint,
    static_field_problems,
    static_problems,
    value_problems,
)
from partitioning.programs.explaining.trace_errors import (
    explain_leak,
    explain_other_devices,
    place_of,
)
from partitioning.programs.trace_log import NO_RESULT, RecompilationError, TraceLog, call_function
from partitioning.rules import describe_axes
from partitioning.state.static_arrays import AS_ARRAY_FIELD, name_static_field

# The weak type of a Python number, not of an array, in a shape or a slice.
_SHAPE_OR_SLICE = re.compile(
    r'(concrete values of integer type|static integers|static start/stop/step).*~u?int'
)
_NEEDED = re.compile(r'depends on the value of the argument (\S+)\.')
_UNBOUND_AXIS = re.compile(r'unbound axis name: ([^\s.]+)')


def find_cause(
    error: Exception,
    boundary: Boundary,
    trace_log: TraceLog,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    abstract: bool,
) -> Exception | None:
    """The error to raise in place of the exception of a call, or None to raise it unchanged.

    `abstract` says whether the call takes ShapeDtypeStructs, as `lower` does.
    """
    if isinstance(boundary.mesh, AbstractMesh) and not abstract:
        return None  # the error says that the mesh has no devices
    if isinstance(error, jax.errors.JaxRuntimeError):
        of_compiler = explain_compiler_error(error, boundary.arguments.function, boundary.mesh)
        if of_compiler is not None:
            return of_compiler
    if isinstance(error, RecompilationError):
        return RecompilationError(str(error))
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return explain_leak(boundary.arguments.function, error)
    if 'metadata fields of pytree' in str(error):
        return _of_static_arrays(error, boundary, args, kwargs)
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_user = call_function.__code__ in frames[:-1]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and (not of_user or 'manual_axis_type' in str(error)):
        return _of_shard_map(boundary)
    if of_user:
        known = _known_error(error, boundary, args) or _needed_value(error, boundary, args, kwargs)
        if known is None:
            if not (is_own_error(error) or 'explains_itself' in vars(error)):
                _add_notes(error, boundary, args, kwargs)
            return None
        found = ValueError(f'{boundary.arguments.function}{known}')
        found.__dict__['unbound_axis'] = _axis_of_pmap(error)
        return found
    if mismatch := boundary.arguments.call_error(args, kwargs):
        return mismatch
    if other := explain_other_devices(boundary.arguments.function, error):
        return other
    problems = _problems(error, boundary, trace_log, args, kwargs, abstract)
    for problem in problems:
        return ValueError(f'{boundary.arguments.function}: {problem}')
    return None


def _problems(
    error: Exception,
    boundary: Boundary,
    trace_log: TraceLog,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    abstract: bool,
) -> Iterator[str]:
    """Everything that is wrong with a call, the most fundamental problems first."""
    yield from entry_problems(boundary, args)
    yield from static_problems(boundary, args)
    arguments = boundary.dynamic(args)
    named: list[tuple[str, int | None, Any]] = [
        # What has a layout was not meant to be static.
        (a.name, a.position if getattr(a.entry, 'is_fully_replicated', True) else None, a.value)
        for a in arguments
    ]
    named += [(name, None, value) for name, value in kwargs.items()]
    for name, index, value in named:
        yield from value_problems(name, index, value, abstract)
        yield from deletion_problems(boundary, name, index, value)
    yield from fit_problems(boundary, arguments)
    if isinstance(error, ValueError):  # which jax raises for a layout; memory has another error
        for argument in arguments:
            yield from layout_problems(boundary, argument)
        yield from device_problems(boundary, kwargs)
    if trace_log.result is not NO_RESULT:
        yield from result_problems(boundary, trace_log.result)
    if 'metadata' in str(error):
        yield from static_field_problems(arguments)


def _of_shard_map(boundary: Boundary) -> ValueError:
    """What to say if a partitioned function is called inside shard_map."""
    function, mesh = boundary.arguments.function, describe_axes(boundary.mesh)
    return ValueError(
        f'{function} is partitioned over {mesh}, but it is called inside shard_map, where each '
        f'device has its part of an array: call the {function} that was given to partition, or '
        'call the partitioned one outside of shard_map'
    )


def _of_static_arrays(
    error: Exception, boundary: Boundary, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ValueError:
    """What to say if jax has failed to compare the static fields of two pytrees."""
    function, fields = boundary.arguments.function, []
    for name, value in boundary.arguments.by_name(args, kwargs).items():
        if (field := name_static_field(value)) is not None:
            fields.append(f'the static field {field} of {name}')
    held = fields[0] if fields else 'a static field of a pytree'
    found = ValueError(
        f'{function}: jax failed to compare static fields{place_of(error)}, which it does in every '
        f'call: {held} holds an array, and two arrays are neither equal nor different: '
        f'{AS_ARRAY_FIELD}, or keep it as a tuple of numbers'
    )
    found.__cause__ = error
    return found


def _known_error(error: Exception, boundary: Boundary, args: Sequence[Any]) -> str | None:
    """What to say of an exception of the user's function after its name, or None."""
    found = _UNBOUND_AXIS.search(str(error)) if isinstance(error, NameError) else None
    if found is not None:  # an axis of pmap, whose collectives programs keep when they are moved
        axis = found[1]
        return (
            f'{place_of(error)}: there is no axis {axis!r} as in pmap. Arrays in a partitioned '
            'function are global, so a mean over the batch already covers all devices: remove '
            f'lax.pmean(x, {axis!r}) and axis_name={axis!r}, or leave the function as it is and '
            f'pass jax.vmap(fn, None, None, axis_name={axis!r}, axis_size=1), in which they do '
            f'nothing. Inside shard_map, use the axes of the mesh, {describe_axes(boundary.mesh)}'
        )
    if isinstance(error, ValueError) and 'mesh' in str(error):
        # Of arguments on another mesh, which jax refuses inside if that mesh has Explicit axes.
        for argument in boundary.dynamic(args):
            for problem in layout_problems(boundary, argument, only_other_meshes=True):
                return f': {problem}'
    if str(error).startswith(('vmap spmd_axis_name', 'A single NamedSharding spec')):
        # Of constraints inside scan or remat, which jax.vmap transforms only afterwards.
        return f'{place_of(error)}: {explain_batched_axis(error)}'
    return None


def _needed_value(
    error: Exception, boundary: Boundary, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """What to say if a trace needed the value of a bool or an integer of the call, or None."""
    text = str(error)
    needs = isinstance(error, jax.errors.ConcretizationTypeError)
    if not needs and not _SHAPE_OR_SLICE.search(text):
        return None
    arguments, named = boundary.arguments, _NEEDED.search(text)
    static = {arguments.name(i) for i in boundary.static}
    for name, value in arguments.by_name(args, kwargs).items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            where = name + jax.tree_util.keystr(path)
            # jax calls keyword arguments entries of one last argument: args[1]['flag'].
            asked = named is None or named[1] == where or named[1].endswith(f'[{where!r}]')
            if not asked or not isinstance(leaf, bool | int) or name in static:
                continue
            write = f'functools.partial({arguments.function}, {name}={leaf!r})'
            if path:
                write = f'an argument of its own for it, which static_argnums names, not {name}'
            elif name in arguments.positional:
                index = arguments.positional.index(name)
                write = f'static_argnums={index}, which compiles it for each value'
            return (
                f'{place_of(error)} needs the value of {where}={leaf!r} while it is traced: '
                f'write {write}'
            )
    return None


def _axis_of_pmap(error: Exception) -> str | None:
    """The axis that a function needs from pmap; inside shard_map, it is a mistake instead."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, NameError) or any(Path(f).name == 'shard_map.py' for f in files):
        return None
    found = _UNBOUND_AXIS.search(str(error))
    return None if found is None else found[1]


def _is_optional(argument: Any, path: tuple) -> bool:
    """Whether the leaf at a path is a field of a dataclass whose default is None."""
    node = argument
    for key in path[:-1]:
        node = getattr(node, key.name, None) if hasattr(key, 'name') else None
    if not path or not dataclasses.is_dataclass(node):
        return False
    name = getattr(path[-1], 'name', None)
    return any(f.name == name and f.default is None for f in dataclasses.fields(node))


def _add_notes(
    error: Exception, boundary: Boundary, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Adds to an exception of the user's function what is unusual about its arguments."""
    is_none = lambda x: x is None  # noqa: E731
    for name, value in boundary.arguments.by_name(args, kwargs).items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_none):
            if leaf is None and 'NoneType' in str(error) and not _is_optional(value, path):
                error.add_note(f'{name}{jax.tree_util.keystr(path)} is None in this call')
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for argument in () if manual else boundary.dynamic(args):
        for leaf in jax.tree.leaves(argument.value):
            if hint := pmap_hint(argument, boundary.mesh, leaf, argument.entry):
                error.add_note(hint.removeprefix('. '))
                return
        of_shapes = isinstance(error, TypeError | ValueError)
        of_shapes = of_shapes and not isinstance(error, jax.errors.ConcretizationTypeError)
        if of_shapes and (hint := shard_hint(argument)):
            error.add_note(hint)
