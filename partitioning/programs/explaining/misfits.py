"""Finds what is wrong with the arguments and the result of a call: values, trees, and layouts.

Each `..._problems` yields one message per problem, which names the argument and its array.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.programs.boundary import Argument, Boundary, is_numeric
from partitioning.rules import (
    check_spec,
    describe_axes,
    padding_problems,
    sharding_str,
    size_problems,
    spec_str,
)
from partitioning.state.structures import TreeMismatchError, children_of, pair_leaves, short_repr
from partitioning.values import kind_str


def entry_problems(boundary: Boundary, args: Sequence[Any]) -> Iterator[str]:
    """Yields a message unless each positional argument that is not static has an entry."""
    if not isinstance(boundary.in_shardings, tuple):
        return
    names = [boundary.arguments.name(i) for i in boundary.dynamic_indices(len(args))]
    count = len(boundary.in_shardings)
    entries = f'{count} entry' if count == 1 else f'{count} entries'
    if count < len(names):
        yield (
            f'in_shardings has {entries}, but {len(names)} positional arguments '
            f'were passed: {", ".join(names)}. Add an entry for {", ".join(names[count:])} (None '
            'replicates it)'
        )
    elif count > len(names):
        passed = f'only {", ".join(names)}' if names else 'no argument'
        yield (
            f'in_shardings has {entries}, but {passed} was passed: pass an argument '
            'for each entry, even if the parameter has a default'
        )


def static_problems(boundary: Boundary, args: Sequence[Any]) -> Iterator[str]:
    """Yields a message for each static argument that is not hashable."""
    for i in boundary.static:
        if i >= len(args):
            continue
        try:
            hash(args[i])
        except TypeError:
            yield (
                f'the static argument {boundary.arguments.name(i)} is a {type(args[i]).__name__}, '
                'which is not hashable: pass a tuple or a frozen dataclass; if it is an array, '
                'remove it from static_argnums'
            )


def value_problems(name: str, index: int | None, value: Any, abstract: bool) -> Iterator[str]:
    """Yields a message for each leaf that is not a number or an array.

    If `abstract` is True, leaves may also be ShapeDtypeStructs.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        where = f'{name}{jax.tree_util.keystr(path)}'
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if not abstract:
                yield f'{where} is a ShapeDtypeStruct, which has no data: pass an array'
            continue
        if not is_numeric(leaf):
            turn = "convert it to numbers, such as x.astype('float32')"
            if leaf.dtype.kind in 'SU':
                turn = 'write numbers for the texts'
            remove = f'remove it from {name}, or ' if path else ''
            yield f'{where} is a numpy array of dtype {leaf.dtype}: {remove}{turn}'
            continue
        try:
            jax.typeof(leaf)
        except OverflowError:
            yield (
                f'{where} is {leaf}, which int32 cannot hold: pass a float or a smaller number, or '
                "set jax.config.update('jax_enable_x64', True)"
            )
        except TypeError:
            yield (
                f'{where} is a {type(leaf).__name__}, {short_repr(leaf)}: a partitioned function '
                f'takes arrays and numbers; {_instead_of(leaf, name, where, index)}'
            )


def _instead_of(leaf: Any, name: str, where: str, index: int | None) -> str:
    """What to pass instead of a leaf that is no array; its argument may be static at `index`."""
    if isinstance(leaf, Iterable) and not hasattr(leaf, '__getitem__'):
        return f'pass what it yields, such as next(iter({where}))'
    if any(isinstance(x, jax.Array | np.ndarray) for x in getattr(leaf, '__dict__', {}).values()):
        return (
            f'pass a dict of its arrays, or register {type(leaf).__name__} with '
            'jax.tree_util.register_dataclass'
        )
    ways = []
    with contextlib.suppress(Exception):  # of classes of the program
        if np.asarray(leaf).dtype.kind not in 'OSUMm':
            ways.append('convert it with numpy.asarray')
    if where != name:
        ways.append(f'remove it from {name}')
    elif index is not None:
        ways.append(f'make it static with static_argnums={index}')
    return ', or '.join(ways) or 'pass a pytree of arrays'


def static_field_problems(arguments: Sequence[Argument]) -> Iterator[str]:
    """Yields a message for each argument whose static fields differ from its entry."""
    for argument in arguments:
        try:
            for _ in argument.pairs(static_fields=True):
                pass
        except TreeMismatchError as error:
            yield (
                f'{argument.name}{jax.tree_util.keystr(error.path)}: the entry in '
                f'in_shardings has {error.first}, but the argument has {error.second}. Make '
                f'the specs from this {argument.name}, for example with partitioner.plan'
            )


def fit_problems(boundary: Boundary, arguments: Sequence[Argument]) -> Iterator[str]:
    """Yields a message for each argument whose tree or shapes do not fit its entry."""
    misfits = [argument for argument in arguments if any(_misfits(boundary, argument))]
    if not misfits:
        return

    def fits(argument: Argument, entry: Any) -> bool:
        return not any(_misfits(boundary, argument._replace(entry=entry)))

    for one, other in itertools.combinations(arguments, 2):
        # Sizes that do not divide say nothing about the order, and no array fits every entry.
        wrong = _differs(one) or _differs(other)
        if wrong and fits(one, other.entry) and fits(other, one.entry):
            yield _wrong_order(one, other)
    hint = ''
    if not isinstance(boundary.in_shardings, tuple) and len(arguments) > 1:
        names = ', '.join(argument.name for argument in arguments)
        hint = f'. in_shardings is one entry for all of {names}: write a tuple with one for each'
    for argument in misfits:
        yield from _other_values(boundary, argument, arguments)
        for problem in _misfits(boundary, argument):
            yield problem + hint


def _other_values(
    boundary: Boundary, argument: Argument, arguments: Sequence[Argument]
) -> Iterator[str]:
    """Yields a message if an argument is another value of the program than its entry is for.

    This is the result of a call as a whole, another argument, or only a part.
    """
    entry, value, name = argument.entry, argument.value, argument.name
    parts, call = children_of(entry), boundary.arguments.function
    if parts is None or _has_structure(entry, value):
        return
    expected = kind_str(entry)
    if isinstance(value, tuple) and value and _has_structure(entry, value[0]):
        names = [a.name for a in arguments]
        rest = ', ...' if len(value) > 2 else ', metrics' if len(value) == 2 else ','
        yield (
            f'{name} is a tuple of {len(value)} that begins with {expected}, which is expected '
            f'here. If it is the result of a call, unpack it: `{name}{rest} = '
            f'{call}({", ".join(names)})`'
        )
    for other in arguments:
        if other.position != argument.position and _has_structure(entry, other.value):
            yield _wrong_order(argument, other)
    for key, part in parts.items():
        if children_of(part) is not None and _has_structure(part, value):
            field = jax.tree_util.keystr((key,), simple=True)
            yield (
                f'{name} is only the part {field} of {expected}, which is expected here: pass the '
                f'whole {name}'
            )


def _wrong_order(one: Argument, other: Argument) -> str:
    first, second = sorted((one, other), key=lambda argument: argument.position)
    return (
        f'{first.name} and {second.name} are in the wrong order, here or in in_shardings: '
        f'{other.name} fits the entry of {one.name}. Swap them in the call, or swap their entries'
    )


def _has_structure(entry: Any, value: Any) -> bool:
    try:
        return all(True for _ in pair_leaves(entry, value, prefix=True, static_fields=False))
    except TreeMismatchError:
        return False


def _differs(argument: Argument) -> bool:
    """Whether an argument has another structure than its entry, or an array another rank."""
    if not jax.tree.leaves(argument.value):
        return False
    try:
        pairs = [*argument.pairs()]
    except TreeMismatchError:
        return True
    return any(len(getattr(s, 'spec', ())) > np.ndim(leaf) for _, s, leaf in pairs)


def result_problems(boundary: Boundary, result: Any) -> Iterator[str]:
    """Yields a message for each part of the result that does not fit out_shardings."""
    try:
        for path, sharding, leaf in pair_leaves(
            boundary.out_shardings, result, prefix=True, static_fields=False
        ):
            where = f'result{jax.tree_util.keystr(path)}'
            if not hasattr(leaf, 'shape'):
                yield f'{where} is a {type(leaf).__name__}, {short_repr(leaf)}: return only arrays'
                continue
            yield from _shape_problems(where, leaf, sharding)
    except TreeMismatchError as error:
        yield (
            f'result{jax.tree_util.keystr(error.path)}: out_shardings has {error.first}, '
            f'but the function returns {error.second}: write one entry for each value that it '
            'returns'
        )


def layout_problems(
    boundary: Boundary, argument: Argument, *, only_other_meshes: bool = False
) -> Iterator[str]:
    """Yields a message for each array that jax does not move to the layout of its entry."""
    for path, sharding, leaf in argument.pairs():
        where = f'{argument.name}{jax.tree_util.keystr(path)}'
        if sharding is None:
            continue
        if isinstance(leaf, np.ndarray) and jax.process_count() > 1:
            if not sharding.is_fully_replicated:
                yield (
                    f'{where} is a numpy array, but each process holds only a part of it: make a '
                    'global array with partitioner.to_global'
                )
            continue
        if not _is_placed(leaf) or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            continue
        if only_other_meshes and getattr(leaf.sharding, 'mesh', None) == boundary.mesh:
            continue
        yield (
            f'{where} of shape {leaf.shape} is laid out as {_layout_str(leaf.sharding)}, but its '
            f'entry in in_shardings says {_layout_str(sharding)}: '
            f'{_move(argument, sharding)}'
        ) + pmap_hint(argument, boundary.mesh, leaf, sharding)


def device_problems(boundary: Boundary, keywords: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each array in `keywords` that is not on the devices of the mesh.

    Keyword arguments keep their layout, so jax does not move them.
    """
    if not isinstance(boundary.mesh, Mesh):
        return
    devices = set(boundary.mesh.devices.flat)
    for name, tree in keywords.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if _is_placed(leaf) and leaf.sharding.device_set != devices:
                yield (
                    f'{name}{jax.tree_util.keystr(path)} is laid out as '
                    f'{_layout_str(leaf.sharding)}, but the function runs on the '
                    f'{len(devices)} devices of {describe_axes(boundary.mesh)}: write '
                    f'jax.device_put({name}, NamedSharding(partitioner.mesh, P()))'
                )


def pmap_hint(argument: Argument, mesh: Mesh, leaf: Any, sharding: Sharding) -> str:
    """A hint if the first dimension of an array seems to count devices, as for pmap; else ''.

    The hint is certain if `jax_utils.replicate` laid out the array. The specs of a plan have one
    entry per dimension, so an array with one dimension more is suspicious too.
    """
    shape = np.shape(leaf)
    if not shape or shape[0] not in (mesh.size, jax.local_device_count()):
        return ''
    held = getattr(leaf, 'sharding', None)
    replicated = (
        isinstance(held, NamedSharding)
        and held.spec == PartitionSpec(*held.mesh.shape)
        and held.mesh.axis_names != mesh.axis_names
    )
    planned = 0 < len(getattr(sharding, 'spec', ())) == len(shape) - 1
    if not replicated and (not planned or isinstance(argument.entry, Sharding)):
        return ''
    return (
        f'. The first dimension of {argument.name}, {shape[0]}, seems to count devices: '
        'remove jax_utils.replicate and jax_utils.shard, which are for pmap; a partitioned '
        'function takes global arrays'
    )


def shard_hint(argument: Argument) -> str:
    """A hint if a batch may have been reshaped with `jax_utils.shard` for pmap; else ''."""
    entry = argument.entry
    if not isinstance(entry, NamedSharding) or entry.is_fully_replicated:
        return ''
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(argument.value)]
    devices = jax.local_device_count()
    if not shapes or any(len(shape) < 2 or shape[0] != devices for shape in shapes):
        return ''
    return (
        f'If the first dimension of {argument.name}, {devices}, counts devices, remove '
        'jax_utils.shard, which is for pmap'
    )


def _misfits(boundary: Boundary, argument: Argument) -> Iterator[str]:
    try:
        for path, sharding, leaf in argument.pairs():
            where = f'{argument.name}{jax.tree_util.keystr(path)}'
            for problem in _shape_problems(where, leaf, sharding):
                hint = pmap_hint(argument, boundary.mesh, leaf, sharding)
                if isinstance(leaf, int | float) and path and hasattr(path[-1], 'idx'):
                    hint += '. A list of numbers is not one array: convert it with numpy.asarray'
                yield problem + hint
    except TreeMismatchError as error:
        where = f'{argument.name}{jax.tree_util.keystr(error.path)}'
        yield (
            f'{where}: the entry in in_shardings has {error.first}, but the argument has '
            f'{error.second}. Make the specs from this {argument.name}, for example with '
            f'partitioner.plan, or pass the {argument.name} from which they were made'
        )


def _shape_problems(where: str, leaf: Any, sharding: Sharding) -> Iterator[str]:
    """Yields a message if a spec has too many entries, or shards that do not divide a dimension."""
    if not isinstance(sharding, NamedSharding):
        return
    shape, spec = np.shape(leaf), sharding.spec
    mesh: Any = sharding.mesh
    try:
        check_spec(spec, mesh, where, shape)
    except ValueError as error:
        yield str(error)
        return
    for dim, problem in size_problems(spec, mesh, shape):
        shown, hint = spec_str(spec), ''
        if not padding_problems(mesh):
            outside = PartitionSpec(*(None if i == dim else e for i, e in enumerate(spec)))
            entry = f'PaddedSpec({spec_str(outside)}, {shown})'
            hint = f'; the entry {entry} pads it inside the function'
        yield f'{where}: {shown}: {problem.message}{hint}'


def _is_placed(leaf: Any) -> bool:
    """Whether the program has put an array on devices, so that jax does not move it."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return leaf.committed


def _move(argument: Argument, sharding: Sharding) -> str:
    name = argument.name
    if not isinstance(argument.entry, Sharding):
        return f'write jax.device_put({name}, plan.shardings)'
    spec = getattr(sharding, 'spec', None)
    if spec is None:
        return f'move it with jax.device_put({name}, sharding)'
    move = f'jax.device_put({name}, NamedSharding(partitioner.mesh, {spec_str(spec)}))'
    if sharding.is_fully_replicated:
        return f'write its own specs as the entry, such as plan.specs, or {move}'
    return f'write {move}'


def _layout_str(sharding: Sharding) -> str:
    """A layout on one line: `P('data') over data 4 x model 2`, or the single device."""
    if len(sharding.device_set) == 1:
        return f'one device, {next(iter(sharding.device_set))}'
    return sharding_str(sharding)
