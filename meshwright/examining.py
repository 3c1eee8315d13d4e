"""A call of a function on a machine, traced and compiled: what every question begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.calls.call import Call, read_call
from meshwright.calls.compiling import Program, Progress, compile_traced
from meshwright.calls.held import HeldArray
from meshwright.calls.target import Target, target_of_mesh, target_of_topology, version_of
from meshwright.jax_private import result_shardings
from meshwright.program.costs import read_text
from partitioning.hardware import OptionValue, check_flags, parse_topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """A call that was traced, and compiled if that was asked for.

    Attributes:
      call: the call, on the machine.
      target: the machine.
      program: the function after tracing, or after compiling.
      held: the arrays of its arguments.
      compiler_options: the options that it was compiled with.
    """

    call: Call
    target: Target
    program: Program
    held: tuple[HeldArray, ...]
    compiler_options: Mapping[str, OptionValue] | None

    @property
    def results(self) -> tuple[Any, ...]:
        """The sharding of each result: as compiled, or as the function states it."""
        compiled = self.program.compiled
        return self.program.traced.results if compiled is None else result_shardings(compiled)


def examine(
    fn: Any,
    args: tuple[Any, ...],
    *,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    compile: bool = True,
    compiler_options: Mapping[str, OptionValue] | None = None,
    on_cpu: bool = False,
    target: Target | None = None,
    on_program: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Examined:
    """Traces a call, moves it to a machine, and compiles it.

    Args:
      fn, args, topology, num_slices, axes, compile, compiler_options, on_cpu, on_program, progress:
        as for `forecast`.
      target: the machine, if the function was made for its mesh already.

    Raises:
      ValueError: as in `forecast`.
    """
    say = progress or (lambda text: None)
    call = read_call(fn, args)
    if target is not None:
        pass
    elif topology is None:
        if axes is not None:
            raise ValueError(
                f'axes={dict(axes)!r} are sizes on another machine: name it, such as '
                "topology='v5p:4x4x4'"
            )
        target = target_of_mesh(call.mesh)
    else:
        say(f'describing {topology}')
        if compile and not on_cpu:
            check_flags(parse_topology(topology)[0].platform)
        target = target_of_topology(
            topology, call.mesh_source, num_slices=num_slices, axes=axes, on_cpu=on_cpu
        )
        call = call.on(target.mesh, with_options=not target.is_stand_in)
    if target.is_stand_in:
        compiler_options = None
    say(f'tracing {call.name}')
    program = Program(traced=call.trace())
    held = call.held(program.traced)
    if compile:
        say(f'compiling {call.name} for {target.topology} with {target.version}')
        program = compile_traced(program, call.name, target.mesh, compiler_options)
    else:
        target = dataclasses.replace(target, back_end='none', version=version_of('none'))
    if on_program is not None and program.compiled is not None:
        on_program(read_text(program.compiled))
    return Examined(
        call=call,
        target=target,
        program=program,
        held=held,
        compiler_options=compiler_options,
    )
