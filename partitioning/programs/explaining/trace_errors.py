"""Errors of jax, flax and optax while a function is traced, in our own words."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import jax

from partitioning.hardware import is_of_pmap
from partitioning.library_files import is_installed_file, is_library_file, is_program_frame
from partitioning.rules import LogicalAxisRules, as_tuple, describe_axes
from partitioning.rules.checks import axis_problems

_ABSENT_AXIS = re.compile(r'Resource axis: (\S+) of ')
_NOT_EXPLICIT = re.compile(
    r'PartitionSpec passed to (\S+) cannot contain axis names .*PartitionSpec: (.*) with axis name'
)
_NOT_AN_ARRAY = re.compile(r"\w+ requires ndarray or scalar arguments, got <class '(\S+)'>")
_TYPED = re.compile(r'\w+\[[\w,()@]*@[\w,()@]*\]')  # float32[8,4@model]
_LEAKED = re.compile(r'intermediate value with type (\S+) wrapped')
_LEAKED_AT = re.compile(r'value was created on line (.+?):(\d+)[:\d]* \((.+?)\)')
_OTHER_MESH = re.compile(r'context mesh .* should match the mesh passed to shard_map (.*)', re.S)
_OTHER_ARRAY = re.compile(
    r'context mesh .* should match the aval mesh AbstractMesh\((.*?)axis_types'
)
_OTHER_DEVICES = re.compile(
    r'device ids (\[.*?\]).* and (\w+).* inside jit with device ids (\[.*?\])'
    r'.* at (\S+?):(\d+)',
    re.S,
)
_AXIS_OF_MESH = re.compile(r"'([^']+)': (\d+)")
_WITHOUT_PMAP = (
    'Arrays in a partitioned function are global, without the dimension of devices that pmap '
    'takes: call the function without pmap (`.__wrapped__` of a pmap object), and remove its '
    'lax.pmean and lax.psum'
)
_LAYERS = ('flax.linen.', 'flax.nnx.nn.')


def translate(error: Exception, rules: LogicalAxisRules) -> ValueError | None:
    """An error that says what is wrong and what to write, if users cannot read the error of jax.

    It has the original as its cause if that says more. Other errors give None.
    """
    if (message := _say(error, rules)) is not None:
        return ValueError(message)
    if (message := _say_of_pmap(error) or _say_of_other_mesh(error)) is not None:
        found = ValueError(message)
        found.__cause__ = error
        return found
    return None


def _say(error: Exception, rules: LogicalAxisRules) -> str | None:
    """What is wrong and what to write, in place of the original.

    A mesh axis may not exist, the program may give an `out_sharding` over Auto axes, a
    transformation of nnx may not name the dimension that it adds, or optax may have received
    something that is not an array. The function was traced under these rules.
    """
    text = str(error)
    if absent := _ABSENT_AXIS.match(text):
        axis = absent[1]
        (problem, *_) = axis_problems([axis], jax.sharding.get_abstract_mesh())
        rule = next((rule for rule in rules if axis in as_tuple(rule[1])), None)
        source = '' if rule is None else f'rule {tuple(rule)!r}: '
        said, _, instead = problem.message.partition('. ')
        return f'{source}{said}{place_of(error)}. {instead}'
    if refused := _NOT_EXPLICIT.match(text):
        return (
            f'the program gives {refused[2]} to {refused[1]}{place_of(error)}, which jax allows '
            "over Explicit mesh axes only. Create the mesh with axis_types='explicit', or lay out "
            'the result with partitioning.constrain instead'
        )
    if '"partition_name" is not specified in transform_metadata' in text:
        return (
            f'a transformation of nnx{place_of(error)} adds a dimension to variables with names, '
            'but does not name it. Write transform_metadata={nnx.PARTITION_NAME: None} in the '
            "transformation, or a name that a rule maps, such as 'layers' with the rule "
            "('layers', None)"
        )
    frames = traceback.walk_tb(error.__traceback__)
    if (other := _NOT_AN_ARRAY.match(text)) and any(
        is_library_file(frame.f_code.co_filename, ('optax',)) for frame, _ in frames
    ):
        return (
            f'optax{place_of(error)} received a {other[1]}, which is not an array: give it arrays '
            'only, for example tx.init(eqx.filter(model, eqx.is_array))'
        )
    return None


def _say_of_pmap(error: Exception) -> str | None:
    """What to say if `jax.pmap` inside a function has failed; an error below it gets a note."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((i for i, frame in enumerate(frames) if is_of_pmap(frame)), default=None)
    if last is None:
        return None
    where = place_of(error)
    if any(map(is_program_frame, frames[last:])):
        error.add_note(f'jax.pmap surrounds this function{where}. {_WITHOUT_PMAP}')
        return None
    return f'the function calls jax.pmap{where}. {_WITHOUT_PMAP}'


def _say_of_other_mesh(error: Exception) -> str | None:
    """What to say of a shard_map over a mesh that is not the mesh of the function."""
    refused = _OTHER_MESH.search(str(error))
    if refused is None:
        return _say_of_other_array(error)
    own, around = _meshes(refused[1])
    return (
        f'shard_map has its own mesh, {own}{place_of(error)}, but the partitioned function runs '
        f"over {around}: pass the program's mesh to the partitioner, PjitPartitioner(mesh=...), "
        'or remove mesh= from shard_map and name the axes of the partitioner in its specs'
    )


def _say_of_other_array(error: Exception) -> str | None:
    """What to say of an array of the program, or of jax.pmap, that is over another mesh."""
    refused = _OTHER_ARRAY.search(str(error))
    if refused is None:
        return None
    if '_internal_pmap_axis' in refused[1]:
        return f'jax.pmap surrounds the function{place_of(error)}. {_WITHOUT_PMAP}'
    own, around = _meshes(refused[1])
    return (
        f'an array that the function uses{place_of(error)} is on another mesh, {own}, but the '
        f'function runs over {around}: pass it as an argument, after jax.device_put(x, '
        'NamedSharding(partitioner.mesh, P()))'
    )


def _meshes(refused: str) -> tuple[str, str]:
    """The mesh in a text of jax, and the mesh of the function, in words."""
    own = {name: int(size) for name, size in _AXIS_OF_MESH.findall(refused)}
    return describe_axes(own), describe_axes(jax.sharding.get_abstract_mesh())


def _short(devices: str) -> str:
    """At most eight of the numbers of devices in a text, such as [0, 1, 2, 3]."""
    numbers = re.findall(r'\d+', devices)
    more = f', ... ({len(numbers)} devices)' if len(numbers) > 8 else ''
    return f'{", ".join(numbers[:8])}{more}'


def explain_other_devices(function: str, error: Exception) -> ValueError | None:
    """An error about an array that a function lays out over other devices than its own."""
    found = _OTHER_DEVICES.search(str(error))
    if found is None:
        return None
    mine, what, theirs, file, line = found.groups()
    explained = ValueError(
        f'{function}: {what} at {Path(file).name}:{line} is over the devices '
        f'{_short(theirs)}, but the partitioner is over {_short(mine)}, '
        "and one program has one order of devices: pass the program's mesh to the partitioner, "
        'PjitPartitioner(mesh=...), or use partitioner.mesh there'
    )
    explained.__cause__ = error
    return explained


def explain_leak(function: str, error: jax.errors.UnexpectedTracerError) -> ValueError:
    """An error about an array of a trace that has ended, which jax calls an unexpected tracer."""
    text = str(error)
    kind, made = _LEAKED.search(text), _LEAKED_AT.search(text)
    array = 'an array' if kind is None else f'an array {kind[1]}'
    where = (
        ''
        if made is None
        else f', made in {made[3].rpartition("<locals>.")[2]} at {Path(made[1]).name}:{made[2]},'
    )
    found = ValueError(
        f'{function}: jax failed while tracing it{place_of(error)}, because it uses {array}{where} '
        'that existed only during another trace. The program keeps it outside of the function, '
        'as in a global, an attribute or a static field: return it and pass it as an argument, or '
        'compute it again where it is used'
    )
    found.__cause__ = error
    return found


def lacks_out_sharding(error: Exception) -> bool:
    """Whether jax may refuse an operation only because the axes of the mesh are Explicit.

    The last case is an error about types that differ by their shardings, such as the carry of a
    scan: float32[8,4] and float32[8,4@model].
    """
    text = str(error)
    is_sharding_error = type(error).__name__ == 'ShardingTypeError'
    return is_sharding_error or 'acts as an assert' in text or _TYPED.search(text) is not None


def needs_explicit_axes(error: Exception) -> bool:
    """Whether jax refuses an operation only because the axes of the mesh are Auto."""
    return _NOT_EXPLICIT.match(str(error)) is not None


def explain_lack(name: str, error: Exception) -> str:
    """Which operation jax refuses over Explicit axes, why, and the beginning of what to write."""
    said = ' '.join(str(error).split())
    said = said if len(said) < 400 else f'{said[:400]} ...'
    return (
        f'{name}: over the Explicit axes of the mesh, jax refuses an operation{place_of(error)}: '
        f'{said.rstrip(".")}. Pass out_sharding= or constrain the inputs'
    )


def place_of(error: BaseException) -> str:
    """Where the program caused an error: ' (in Embed, called at model.py:12)', or ''."""
    layer = line = ''
    of_program = False
    for frame, number in traceback.walk_tb(error.__traceback__):
        path, method_of = frame.f_code.co_filename, type(frame.f_locals.get('self'))
        if method_of.__module__.startswith(_LAYERS):
            layer = f'in {method_of.__name__}, called '
        elif is_program_frame(frame):
            if is_installed_file(path) and of_program:
                continue  # a model that the user has installed says less than the user's own line
            of_program = not is_installed_file(path)
            layer, line = '', f'{Path(path).name}:{number}'
    return f' ({layer}at {line})' if line else ''
