"""Compiles what a script calls for the described machine, and returns stand-ins as results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from meshwright import jax_private
from meshwright.calls.callers import named_by_caller
from meshwright.calls.other_meshes import on_one_mesh
from meshwright.dry.machine import Machine
from meshwright.dry.stand_in import StandIn
from meshwright.jaxpr.values import is_backward
from meshwright.program.costs import read_memory
from meshwright.time.kernels import count_device_flops, find_kernel_work
from meshwright.user_lines import is_of_jax
from partitioning.hardware import JaxDevice
from partitioning.hardware.compilers import OutOfMemoryError, own_compiler_errors
from partitioning.products.flops import bodies_of

# A call with larger results, with more FLOPs or with a backward pass does not run on this machine,
# even if the script does not say where it is to run.
HOST_BYTES, HOST_FLOPS = 64 * 2**20, 10**7
_RETURNED = 1 / 3  # of the bytes of its arguments, by a function that updates a state


@dataclasses.dataclass(kw_only=True, eq=False)
class CompiledFunction:
    """A function that the script has compiled, for arguments of certain types.

    Attributes:
      call: its trace and its arguments.
      executable: the compiled program; None if the memory of a device does not suffice.
      out_of_memory: how much memory it needs, if the compiler says that a device has less.
      devices: the devices that it was compiled for.
      consumed: the positions of the arguments that its results replace.
      seconds: the time of compiling.
      calls: how often it was called.
    """

    call: jax_private.TracedCall
    executable: Any
    out_of_memory: OutOfMemoryError | None
    devices: tuple[JaxDevice, ...]
    consumed: frozenset[int]
    seconds: float
    calls: int = 0

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.call.name

    @property
    def peak(self) -> int:
        """The most memory of a device that is in use at any time, in bytes; 0 without a program."""
        memory = None
        if self.executable is not None:
            memory = read_memory(self.executable, self.devices[0].platform)
        return 0 if memory is None else memory.peak

    @property
    def source(self) -> Any:
        """The code of the function; equal for traces of one function."""
        return self.call.jaxpr.jaxpr.debug_info.func_src_info

    @property
    def is_operation(self) -> bool:
        """Whether it is an operation that the script calls outside `jit`."""
        return is_of_jax(str(self.source))

    @functools.cached_property
    def flops(self) -> float:
        """Its FLOPs on all devices together."""
        jaxpr = self.call.jaxpr
        return count_device_flops(jaxpr, 1, find_kernel_work(jaxpr))[0]

    @functools.cached_property
    def has_backward_pass(self) -> bool:
        """Whether it takes gradients, as a training step does."""
        return _has_backward_pass(self.call.jaxpr.jaxpr)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether it has a backward pass, or returns a large part of what it takes.

        A training step does; an evaluation or a step of an environment does not, and neither does
        one operation outside `jit`, such as a product of square matrices.
        """
        jaxpr = self.call.jaxpr
        if self.has_backward_pass:
            return True
        if self.is_operation:
            return False
        taken = _count_kinds(jaxpr.in_avals)
        returned = taken & _count_kinds(jaxpr.out_avals)
        return _count_bytes(returned) > _RETURNED * _count_bytes(taken)


def _count_kinds(avals: Any) -> collections.Counter[tuple[tuple[int, ...], Any]]:
    return collections.Counter((tuple(x.shape), x.dtype) for x in avals if hasattr(x, 'dtype'))


def _count_bytes(kinds: collections.Counter[tuple[tuple[int, ...], Any]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize * n for (shape, dtype), n in kinds.items())


def _has_backward_pass(jaxpr: Any) -> bool:
    return any(
        is_backward(str(equation.source_info.name_stack))
        or any(map(_has_backward_pass, bodies_of(equation)))
        for equation in jaxpr.eqns
    )


class Compiling:
    """Compiles and imitates the functions of a script.

    Args:
      machine: the machine.
      on_compile: makes the context in which a function is compiled.
      on_call: is told of each call of a function.
      on_no_memory: is told of a function that does not fit.

    Attributes:
      functions: those that were compiled for the machine, in this order.
    """

    def __init__(
        self,
        machine: Machine,
        on_compile: Callable[[], contextlib.AbstractContextManager[None]],
        on_call: Callable[[CompiledFunction], None],
        on_no_memory: Callable[[CompiledFunction], None],
    ):
        self.functions: list[CompiledFunction] = []
        self._machine = machine
        self._on_compile = on_compile
        self._on_call = on_call
        self._on_no_memory = on_no_memory
        self._lowered: dict[Any, jax_private.TracedCall] = {}
        self._small: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._by_program: dict[int, CompiledFunction] = {}
        self._executables: list[tuple[Any, Any]] = []

    def replacements(self) -> list[jax_private.Replacement]:
        """What to put in place of jax's own functions."""
        return [
            jax_private.on_lower(self._record),
            jax_private.on_compile(self._compile),
            *jax_private.on_run(self._runner),
            jax_private.on_call(self._context),
        ]

    def _record(self, computation: Any, call: jax_private.TracedCall) -> None:
        self._lowered[computation] = named_by_caller(call)

    def _compile(self, computation: Any, options: Any, compile_now: Callable[[], Any]) -> Any:
        call = self._lowered.get(computation)
        devices = jax_private.devices_of(computation)
        if call is None or not any(map(self._machine.has, devices)):
            return compile_now()
        # A function that a script compiles by itself is lowered again when it is called.
        key = (call.name, options, *jax_private.describe_lowered(computation))
        for known, executable in self._executables:
            if known == key:
                return executable
        started, executable, exceeded = time.perf_counter(), None, None
        try:
            with self._on_compile(), own_compiler_errors(call.name, self._machine.mesh):
                executable = compile_now()
        except OutOfMemoryError as error:
            exceeded = error
        found = CompiledFunction(
            call=on_one_mesh(call),
            executable=executable,
            out_of_memory=exceeded,
            devices=devices,
            consumed=jax_private.consumed_arguments(computation),
            seconds=time.perf_counter() - started,
        )
        self.functions.append(found)
        if executable is None:
            self._on_no_memory(found)
        self._by_program[id(jax_private.program_of(executable))] = found
        self._executables.append((key, executable))
        return executable

    def _runner(self, program: jax_private.RunnableProgram) -> Callable[..., Any] | None:
        if not any(map(self._machine.has, program.devices)):
            return None
        return functools.partial(self._run, program)

    def _run(self, program: jax_private.RunnableProgram, *args: Any) -> list[Any]:
        """Returns the results of a program as stand-ins, and deletes what it was donated."""
        numbers = [jax_private.numbers_of(x) for x in args]
        for x in numbers:
            if isinstance(x, StandIn):
                x.check_not_deleted()
        found = self._by_program.get(id(program.unloaded))
        if found is not None:
            found.calls += 1
            for i in found.consumed:
                if isinstance(x := numbers[i], StandIn):
                    x.delete()
            self._on_call(found)

        def make(aval: Any, sharding: Any) -> StandIn:
            return StandIn(aval, sharding, self._machine, committed=program.committed)

        return [jax_private.make_array(make, *output) for output in program.outputs]

    @contextlib.contextmanager
    def _context(self, args: tuple[Any, ...], jaxpr: Any, mesh: Any) -> Iterator[None]:
        """Lets a call that is too large for this machine run on a described device.

        So does a call with an array of such a device, even if nobody has placed it there.
        """
        stands_in = any(isinstance(jax_private.numbers_of(x), StandIn) for x in args)
        if not stands_in and self._is_small(jaxpr):
            yield
            return
        with jax.default_device(self._machine.local(self._machine.devices)[0]):
            yield

    def _is_small(self, jaxpr: Any) -> bool:
        """Whether a call is computed on this machine, if nothing says where it is to run."""
        if jaxpr not in self._small:
            nbytes = _count_bytes(_count_kinds(jaxpr.out_avals))
            flops = count_device_flops(jaxpr, 1, find_kernel_work(jaxpr))[0]
            trains = flops and _has_backward_pass(jaxpr.jaxpr)
            self._small[jaxpr] = nbytes <= HOST_BYTES and flops <= HOST_FLOPS and not trains
        return self._small[jaxpr]
