"""What a lowered function or a compiled program says of its call, without a trace."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshwright.calls.held import HeldArray
from meshwright.calls.plain_call import hold, parts_of_name
from meshwright.program.costs import read_text
from partitioning.state import key_names

_NAME = re.compile(r'^HloModule (?:jit_)?(?P<name>[\w.<>-]+)')
_PARAMETER = re.compile(r' parameter\((?P<number>\d+)\).*?op_name="(?P<name>[^"]+)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledCall:
    """A compiled program with its arguments and results.

    Attributes:
      name: the name of the function.
      compiled: the program.
      mesh: the largest mesh of its arguments and results.
      held: the arrays of its arguments.
      results: the path, the type and the sharding of each result.
    """

    name: str
    compiled: jax.stages.Compiled
    mesh: Mesh
    held: tuple[HeldArray, ...]
    results: tuple[tuple[tuple[str, ...], Any, Any], ...]


def is_compiled(fn: Any) -> bool:
    """Whether a function was lowered or compiled."""
    return isinstance(fn, jax.stages.Lowered | jax.stages.Compiled)


def check_no_trace_needed(
    fn: Any,
    args: tuple[Any, ...],
    *,
    topology: str | None = None,
    axes: Mapping[str, int] | None = None,
    compile: bool = True,
    question: str = '',
) -> None:
    """Raises ValueError if something needs a trace, which a lowered or compiled function lacks.

    Args:
      fn: the lowered or compiled function.
      args: the arguments, of which there must be none.
      topology, axes, compile: as for `forecast`.
      question: what needs a trace in any case, such as 'lint'.
    """
    made = 'lowered' if isinstance(fn, jax.stages.Lowered) else 'compiled'
    why = ''
    if args:
        why = 'has its arguments already: pass no others'
    elif topology is not None or axes is not None:
        why = (
            'is for one machine and one mesh, so it cannot be moved to another: pass the function '
            'of jax.jit itself, or what its trace(...) returned'
        )
    elif not compile:
        why = (
            'has no trace, from which formulas compute: leave out compile=False, or pass the '
            'function of jax.jit itself'
        )
    elif question:
        why = (
            f'has no trace, which {question} reads: pass the function of jax.jit itself with its '
            'arguments, or what its trace(...) returned'
        )
    if why:
        raise ValueError(f'a {made} function {why}')


def read_compiled(fn: Any) -> CompiledCall:
    """What a lowered function, which is compiled, or a compiled program says of its call.

    Raises:
      ValueError: if none of its arguments and results has a NamedSharding, so that it has no mesh.
    """
    compiled: jax.stages.Compiled = fn.compile() if isinstance(fn, jax.stages.Lowered) else fn
    arguments = list(_leaves(compiled.args_info, compiled.input_shardings))
    results = list(_leaves(compiled.out_info, compiled.output_shardings))
    text = read_text(compiled)
    named = _NAME.match(text)
    name = named['name'] if named else 'the function'
    names = _argument_names(text)
    if len(names) == len(arguments):  # XLA drops arguments that are not used
        arguments = [
            (parts_of_name(one), *about[1:]) for one, about in zip(names, arguments, strict=True)
        ]
    shardings = [sharding for *_, sharding in (*arguments, *results)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    found = [mesh for mesh in meshes if isinstance(mesh, Mesh) and not mesh.empty]
    if not found:
        raise ValueError(
            f'{name} has no mesh: no argument or result of the compiled program has a '
            'NamedSharding. Give the arguments shardings when you lower it'
        )
    mesh = max(found, key=lambda one: one.size)
    held = tuple(
        hold(path, jax.ShapeDtypeStruct(x.shape, x.dtype), sharding, mesh)
        for path, x, sharding in arguments
    )
    return CompiledCall(
        name=name,
        compiled=compiled,
        mesh=mesh,
        held=held,
        results=tuple((('result', *path), x, sharding) for path, x, sharding in results),
    )


def _argument_names(text: str) -> list[str]:
    """The names of the parameters of a program, in their order: "state.params['w']"."""
    entry = text.partition('\nENTRY ')[2]
    found = {int(m['number']): m['name'].replace("\\'", "'") for m in _PARAMETER.finditer(entry)}
    return [found[n] for n in sorted(found)]


def _leaves(infos: Any, shardings: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The path, the type and the sharding of each array; jax drops arguments that are not used."""
    placed = {
        jax.tree_util.keystr(path): sharding
        for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]
    }
    for path, info in jax.tree_util.tree_flatten_with_path(infos)[0]:
        yield tuple(key_names(path)), info, placed.get(jax.tree_util.keystr(path))
