"""Everything in `meshwright` that depends on names of jax which are not public.

`tests/meshwright/test_jax_private.py` has a test for each, which fails first when jax changes it.

A jitted function goes through three places of jax. A program that the user has compiled by
`jax.jit(f).lower(...).compile()` goes through the second and third as well:

    _resolve_and_lower(types, jaxpr=..., ...) -> MeshComputation
    MeshComputation.compile()                 -> MeshExecutable
    UnloadedMeshExecutable.build_unsafe_call  -> the function that runs the program
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    ad_util,
    array,
    core,
    dispatch,
    distributed,
    dtypes,
    pjit,
    sharding_impls,
    source_info_util,
    xla_bridge,
)
from jax._src.interpreters import mlir, pxla
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.numpy import array_methods
from jax._src.sharding import Sharding
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

# An object, the name of an attribute, and what to put there.
Replacement = tuple[Any, str, Any]


def make_cpu_devices(count: int) -> list[Any]:
    """Virtual CPU devices in a client of their own; jax has no public way to make a second one."""
    client: Any = xla_client.make_cpu_client(num_devices=count)
    return list(client.devices())


# Arrays without values.


def register_array_type(kind: Any) -> None:
    """Makes jax take objects of a class as arrays, of which it needs the types and shardings only.

    Args:
      kind: a subclass of `jax.Array` with the attributes `aval`, `sharding` and `_committed`.
    """
    own = set(vars(kind))
    # Other libraries ask for the name of the class, or for the package in it.
    for name in ('__name__', '__qualname__', '__module__'):
        setattr(kind, name, getattr(array.ArrayImpl, name))
    array_methods._set_array_base_attributes(kind, exclude=own)
    array_methods._set_array_attributes(kind)
    kind.__getitem__ = array.ArrayImpl.__getitem__
    core.pytype_aval_mappings[kind] = lambda x: core.update_aval_with_sharding(x.aval, x.sharding)
    dtypes.canonicalize_value_handlers[kind] = lambda x: x
    pxla.shard_arg_handlers[kind] = lambda xs, *rest: list(xs)
    ad_util.raw_jaxval_adders[kind] = ad_util.raw_jaxval_adders[array.ArrayImpl]
    mlir.register_constant_handler(kind, lambda x, aval: mlir.ir_constant(x._value))


def has_attribute_of_arrays(name: str) -> bool:
    """Whether the arrays of jax have an attribute, which may be private."""
    return hasattr(array.ArrayImpl, name)


def shaped(shape: Sequence[int], dtype: Any, sharding: Any = None) -> Any:
    """The type of an array."""
    aval = core.ShapedArray(tuple(shape), dtype)
    return aval if sharding is None else core.update_aval_with_sharding(aval, sharding)


def numbers_of(x: Any) -> Any:
    """The array of numbers that holds an array of random keys; any other array as it is."""
    return getattr(x, '_base_array', x)


def make_array(make: Callable[[Any, Any], Any], aval: Any, sharding: Any) -> Any:
    """An array of a type, also of random keys.

    Args:
      make: makes an array of numbers from its type and its sharding.
      aval: the type.
      sharding: the sharding.
    """
    if not jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return make(aval, sharding)
    below = sharding_impls.physical_sharding(aval, sharding)
    numbers = make(core.physical_aval(aval), below)
    return jax.random.wrap_key_data(numbers, impl=aval.dtype._impl.name)


# Jitted functions and compiled programs.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TracedCall:
    """A jitted function that was traced for arguments of certain types.

    Attributes:
      name: its name.
      jaxpr: its trace, a ClosedJaxpr.
      arguments: the sharding of each array of the arguments, as the function or the array states
        it; None where nothing does.
      results: the sharding of each result as the function states it.
      donated: for each array of the arguments, whether the results may replace it.
      argument_names: how jax names these arrays: "state.params['w']".
      result_names: the same of the results: "result[0].params['w']".
      uncommitted: for each array of the arguments, whether it is an array or number that no
        sharding binds to its device, so that it is on the default one.
      mesh: the mesh that was set when it was traced, or None.
      settings: other settings of `jax.jit`, by name.
      lower: lowers it, so that `.compile()` of the result compiles it.
    """

    name: str
    jaxpr: Any
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    donated: tuple[bool, ...]
    argument_names: tuple[str, ...]
    result_names: tuple[str, ...]
    uncommitted: tuple[bool, ...]
    mesh: Any
    settings: dict[str, Any]
    lower: Callable[[], Any]

    @property
    def shardings(self) -> list[Any]:
        """All shardings that the function and its arguments state, also inside."""
        inside = [sharding for sharding, _ in dispatch.get_intermediate_shardings(self.jaxpr)]
        return [*self.arguments, *self.results, *inside]

    @property
    def meshes(self) -> list[Mesh | AbstractMesh]:
        """All meshes that these shardings name, and the one that was set."""
        named = [s.mesh for s in self.shardings if isinstance(s, NamedSharding)]
        return [mesh for mesh in (*named, self.mesh) if mesh is not None and not mesh.empty]


def read_trace(traced: Any) -> TracedCall:
    """What `trace` of a function of `jax.jit` returned."""
    return _read_call(traced._meta_tys_flat, traced._params, traced.lower)


def _read_call(types: Any, params: dict[str, Any], lower: Callable[[], Any]) -> TracedCall:
    jaxpr = params['jaxpr']
    about = jaxpr.jaxpr.debug_info
    mesh = params['ctx_mesh']
    stated = zip(params['in_shardings'], types, strict=True)
    options = dict(params['compiler_options_kvs'])
    return TracedCall(
        name=params['name'],
        jaxpr=jaxpr,
        arguments=tuple(_stated_sharding(*pair) for pair in stated),
        results=tuple(params['out_shardings']),
        donated=tuple(params['donated_invars']),
        argument_names=_names(about.arg_names, len(jaxpr.in_avals), 'args'),
        result_names=_names(about.result_paths, len(jaxpr.out_avals), 'result'),
        uncommitted=tuple(map(_is_uncommitted, types)),
        mesh=None if mesh.empty else mesh,
        settings={'compiler_options': options or None, 'keep_unused': params['keep_unused']},
        lower=lower,
    )


def _names(given: Sequence[str] | None, count: int, else_name: str) -> tuple[str, ...]:
    names = given or ()
    return tuple(names[i] if i < len(names) else f'{else_name}[{i}]' for i in range(count))


def _stated_sharding(stated: Any, kind: Any) -> Any:
    return stated if isinstance(stated, Sharding) else kind.sharding if kind.committed else None


def _is_uncommitted(kind: Any) -> bool:
    return kind.is_np_array or (not kind.committed and kind.sharding is not None)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunnableProgram:
    """A compiled program that is about to be run for the first time.

    Attributes:
      unloaded: jax's object for it.
    """

    unloaded: Any

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices that it was compiled for."""
        return tuple(self.unloaded.device_list)

    @property
    def outputs(self) -> list[tuple[Any, Any]]:
        """The type and the sharding of each result."""
        found = self.unloaded
        return list(zip(found.output_avals, found.output_shardings, strict=True))

    @property
    def committed(self) -> bool:
        """Whether its results are committed to their devices."""
        return self.unloaded.committed


def on_lower(seen: Callable[[Any, TracedCall], None]) -> Replacement:
    """Tells of each jitted function that jax lowers, with the object whose `compile` compiles it.

    jax keeps that object, so it is the same one in later calls with equal types.
    """
    original = pjit._resolve_and_lower

    def lower(arg_types: Any, **params: Any) -> Any:
        computation = original(arg_types, **params)
        call = _read_call(arg_types, params, lambda: computation)
        seen(computation, call)
        return computation

    return pjit, '_resolve_and_lower', lower


def on_compile(compile_with: Callable[[Any, Any, Callable[[], Any]], Any]) -> Replacement:
    """Wraps the compilation of a lowered function.

    Args:
      compile_with: receives what `on_lower` was told of, the options of this compilation, and a
        function that compiles it; returns what that function returns.
    """
    original = pxla.MeshComputation.compile
    # Some versions of jax compile again in each call if there are options.
    kept: dict[Any, Any] = {}

    def compile_(self: Any, compiler_options: Any = None, **given: Any) -> Any:
        known = {name: value for name, value in given.items() if value is not None}
        options = tuple(sorted((compiler_options or {}).items())), tuple(sorted(known.items()))
        if (self, options) not in kept:
            kept[self, options] = compile_with(
                self, options, lambda: original(self, compiler_options, **given)
            )
        return kept[self, options]

    return pxla.MeshComputation, 'compile', compile_


def on_run(runner: Callable[[RunnableProgram], Callable[..., Any] | None]) -> list[Replacement]:
    """Runs compiled programs in place of jax.

    Args:
      runner: returns a function that takes the arguments and returns the results of a program, or
        None if jax is to run it.
    """
    build = pxla.UnloadedMeshExecutable.build_unsafe_call

    def new_build(self: Any) -> Any:
        run = runner(RunnableProgram(unloaded=self))
        return build(self) if run is None else run

    replaced: list[Replacement] = [(pxla.UnloadedMeshExecutable, 'build_unsafe_call', new_build)]
    if (constants := getattr(pxla.MeshExecutable, 'shard_const_args', None)) is not None:

        def new_constants(self: Any, given: Any) -> Any:
            own = runner(RunnableProgram(unloaded=self._unloaded_executable)) is not None
            return given if own else constants(self, given)

        replaced.append((pxla.MeshExecutable, 'shard_const_args', new_constants))
    return replaced


def program_of(executable: Any) -> Any:
    """The object that `RunnableProgram.unloaded` is for a compiled program."""
    return executable._unloaded_executable


def result_shardings(compiled: Any) -> tuple[Any, ...]:
    """The sharding of each result of a compiled program, in their order."""
    executable = getattr(compiled, '_executable', compiled)
    return tuple(program_of(executable).output_shardings)


# What decides about a compiled program besides the text of the lowered function.
_COMPILED_BY = (
    'global_in_avals',
    'global_out_avals',
    'in_shardings',
    'out_shardings',
    'in_layouts',
    'out_layouts',
    'kept_var_idx',
    'committed',
    'ordered_effects',
    'unordered_effects',
    'host_callbacks',
    'keepalive',
)


def describe_lowered(computation: Any) -> tuple[Any, ...]:
    """What decides about the program of a lowered function; equal for equal programs.

    The lines of code that the function comes from are not part of it.
    """
    given = computation.compile_args
    text = computation._hlo.operation.get_asm(enable_debug_info=False)
    return (
        hashlib.sha256(text.encode()).hexdigest(),
        computation._device_list,
        computation._compiler_options_kvs,
        *(given.get(name) for name in _COMPILED_BY),
    )


def consumed_arguments(computation: Any) -> frozenset[int]:
    """The positions of the arguments that a lowered function replaces by its results.

    The constants of the function count as the first arguments. An argument that was donated in
    vain, because no result has its size, is not among them: it can be used again.
    """
    main = ir.SymbolTable(computation._hlo.operation)['main']
    kept = sorted(computation.compile_args['kept_var_idx'])
    given: Any = main.attributes['arg_attrs']
    attributes = list(given)[-len(kept) :] if kept else []
    marks = ('tf.aliasing_output', 'jax.buffer_donor')
    return frozenset(
        position
        for position, own in zip(kept, attributes, strict=True)
        if any(mark in own for mark in marks)
    )


def on_call(before: Callable[[tuple[Any, ...], Any, Any], Any]) -> Replacement:
    """Enters a context around each call of a jitted function that jax has not compiled yet.

    Args:
      before: receives the arguments, the jaxpr and the mesh of the context; returns the context.
    """
    original = pjit._pjit_call_impl_python

    def call(*args: Any, **params: Any) -> Any:
        with before(args, params['jaxpr'], params['ctx_mesh']):
            return original(*args, **params)

    return pjit, '_pjit_call_impl_python', call


# Where arrays are placed, and which devices belong to the process.


def on_place(place: Callable[[Any, Any, Any], Any]) -> Replacement:
    """Places arrays in place of jax.

    Args:
      place: receives an array, its type and a device or sharding (None for the default); returns
        the placed array, or None if jax is to place it.
    """
    original = dispatch._device_put_sharding_impl

    def put(x: Any, aval: Any, device: Any, copy: Any) -> Any:
        placed = place(x, aval, device)
        return original(x, aval, device, copy) if placed is None else placed

    return dispatch, '_device_put_sharding_impl', put


def on_place_parts(place: Callable[[Any, Any], Any]) -> Replacement:
    """Places arrays that come in parts, one for each device.

    Args:
      place: receives the type and the sharding of an array; returns it, or None if jax is to make
        it.
    """
    original = pxla.batched_device_put

    def put(aval: Any, sharding: Any, xs: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
        placed = place(aval, sharding)
        return original(aval, sharding, xs, devices, *args, **kwargs) if placed is None else placed

    return pxla, 'batched_device_put', put


def local_properties(
    has: Callable[[Any], bool], local: Callable[[Sequence[Any]], list[Any]]
) -> list[Replacement]:
    """Answers which devices of a mesh or sharding belong to the process.

    Args:
      has: whether to answer for a mesh or a sharding, in place of jax.
      local: returns which of some devices belong to the process.
    """

    def all_local(x: Any) -> bool:
        return len(local(_ordered(x))) == len(_ordered(x))

    answers: dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
        'is_fully_addressable': (
            (NamedSharding, SingleDeviceSharding, sharding_impls.GSPMDSharding),
            all_local,
        ),
        'addressable_devices': ((Sharding, NamedSharding), lambda x: set(local(_ordered(x)))),
        'has_addressable_devices': ((Sharding,), lambda x: bool(local(_ordered(x)))),
        '_addressable_device_assignment': ((Sharding,), lambda x: tuple(local(_ordered(x)))),
        'local_devices': ((Mesh,), lambda x: local(_ordered(x))),
        '_local_devices_set': ((Mesh,), lambda x: set(local(_ordered(x)))),
        'is_multi_process': ((Mesh,), lambda x: not all_local(x)),
    }
    parts = Sharding.addressable_devices_indices_map

    def local_parts(self: Any, shape: Any) -> Any:
        if not has(self):
            return parts(self, shape)
        found = self.devices_indices_map(shape)
        return {device: found[device] for device in local(_ordered(self))}

    replaced: list[Replacement] = [(Sharding, 'addressable_devices_indices_map', local_parts)]
    for name, (owners, answer) in answers.items():
        for owner in owners:
            if name in vars(owner):
                replaced.append((owner, name, _property(owner, name, has, answer)))
    return replaced


def _property(owner: type, name: str, has: Any, answer: Any) -> property:
    original = vars(owner)[name]
    return property(lambda x: answer(x) if has(x) else original.__get__(x, owner))


def _ordered(x: Any) -> Sequence[Any]:
    return x.devices.ravel().tolist() if isinstance(x, Mesh) else x._device_assignment


def replace_everywhere(original: Any, replacement: Any) -> list[Replacement]:
    """Puts an object in the place of another one in all modules of jax that are loaded."""
    return [
        (module, name, replacement)
        for module in list(sys.modules.values())
        if getattr(module, '__name__', '').partition('.')[0] == 'jax'
        for name, value in list(vars(module).items())
        if value is original
    ]


def device_questions() -> dict[str, Any]:
    """The functions of jax that tell the devices and processes, by name."""
    names = ('devices', 'local_devices', 'device_count', 'local_device_count', 'default_backend')
    processes = ('process_index', 'process_count', 'process_indices')
    return {name: getattr(xla_bridge, name) for name in (*names, *processes)}


def client_of_processes(client: Any) -> Replacement:
    """The object through which processes wait for one another."""
    return distributed.global_state, 'client', client


# Where functions are that choose the kernels of TPUs, in newer and in older versions of jax.
_TPU_INFO = ('jax._src.tpu_info', 'jax._src.pallas.mosaic.tpu_info')


def questions_about_default_device(answer: Callable[[Any], Any]) -> list[Replacement]:
    """Answers which device is the default one, where kernels are chosen by it.

    Where arrays are placed by it, nothing changes.

    Args:
      answer: receives the default device, and returns the one to tell.
    """
    from jax.extend import backend

    def device() -> Any:
        return answer(pxla.get_default_device())

    def attribute(name: str, original: Any) -> Any:
        def ask() -> Any:
            stated = jax.sharding.get_abstract_mesh().abstract_device
            return original() if stated else getattr(device(), name)

        return ask

    replaced: list[Replacement] = [(backend, 'get_default_device', device)]
    for module in _TPU_INFO:
        if importlib.util.find_spec(module) is None:
            continue
        found = importlib.import_module(module)
        for name, of in (('get_device_kind', 'device_kind'), ('get_num_device_cores', 'num_cores')):
            if (original := getattr(found, name, None)) is not None:
                replaced += replace_everywhere(original, attribute(of, original))
        break
    return replaced


def questions_about_cudnn(version: int, capability: str) -> list[Replacement]:
    """Answers what attention by cuDNN asks before it is lowered.

    Args:
      version: the version of cuDNN, such as 91300 for 9.13.
      capability: the compute capability of the GPUs, such as '9.0'.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split('.')))

    answers: dict[str, Any] = {
        'check_cudnn_version': lambda: version,
        'check_compute_capability': lambda least: numbers(capability) >= numbers(least),
        'is_cuda_compute_capability_equal': lambda other: numbers(capability) == numbers(other),
    }
    return [(module, name, answer) for name, answer in answers.items() if hasattr(module, name)]


def devices_of(computation: Any) -> tuple[Any, ...]:
    """The devices that a lowered function will be compiled for; () if they are not known."""
    return tuple(computation._device_list or ())


# Traces.


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Does what a trace does. Equations keep their lines."""
    return core.eval_jaxpr(jaxpr, consts, *args)


@contextlib.contextmanager
def at_line_of(equation: Any) -> Iterator[None]:
    """Gives what is traced inside the line and the name of an equation."""
    source = equation.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=name_stack):
        yield


def bind(equation: Any, args: Sequence[Any], *, in_context: bool = True) -> list[Any]:
    """Does what one equation does.

    Args:
      equation: the equation.
      args: its operands.
      in_context: whether to do it under the settings and on the mesh of its trace.
    """
    found = equation.primitive.get_bind_params(equation.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # jax 0.9 has both
    with at_line_of(equation), equation.ctx.manager if in_context else contextlib.nullcontext():
        made = equation.primitive.bind(*functions, *args, **params)
    return list(made) if equation.primitive.multiple_results else [made]


class _ContextOnMesh:
    """The settings under which an equation was traced, with another mesh."""

    def __init__(self, own: Any, mesh: Any):
        self._own = own
        self.cur_abstract_mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property
    def manager(self) -> Any:
        return type(self._own.manager)(self)


def with_params(equation: Any, change: Callable[[Any], Any]) -> Any:
    """An equation whose parameters and mesh are changed, all by the same function."""
    params = {name: change(value) for name, value in equation.params.items()}
    mesh = equation.ctx.cur_abstract_mesh
    context = equation.ctx if mesh.empty else _ContextOnMesh(equation.ctx, change(mesh))
    return equation.replace(params=params, ctx=context)


def on_mesh(
    jaxpr: Any, change: Callable[[Any], Any], change_parameter: Callable[[Any], Any]
) -> Any:
    """The same trace, a Jaxpr or a ClosedJaxpr, whose values have other shardings.

    Args:
      change: makes the sharding of a value of the sharding that it has.
      change_parameter: makes a parameter of an equation, or a mesh.
    """
    opened = getattr(jaxpr, 'jaxpr', jaxpr)
    if opened is not jaxpr:  # In the newest jax, all are closed.
        return jaxpr.replace(jaxpr=on_mesh(opened, change, change_parameter))
    copies: dict[Any, Any] = {}

    def variables(found: Sequence[Any]) -> list[Any]:
        return [literal(v) if isinstance(v, core.Literal) else variable(v) for v in found]

    def moved(aval: Any) -> Any:
        sharding = getattr(aval, 'sharding', None)
        known = isinstance(sharding, NamedSharding)
        return aval.update(sharding=change(sharding)) if known else aval

    def literal(v: Any) -> Any:
        # A constant remembers the mesh of its first use. A copy does not.
        value = v.val.copy() if isinstance(v.val, np.ndarray) else v.val
        return core.Literal(value, moved(v.aval))

    def variable(v: Any) -> Any:
        if v not in copies:
            copies[v] = copy.copy(v)
            copies[v].aval = moved(v.aval)
        return copies[v]

    inputs = {name: variables(getattr(jaxpr, name)) for name in ('constvars', 'invars')}
    equations = [
        with_params(e, change_parameter).replace(
            invars=variables(e.invars), outvars=variables(e.outvars)
        )
        for e in jaxpr.eqns
    ]
    return jaxpr.replace(**inputs, eqns=equations, outvars=variables(jaxpr.outvars))


def trace_again(
    call: TracedCall, function: Callable[..., Any], change: Callable[[Any], Any]
) -> TracedCall:
    """Traces a function of flat arguments in place of another one, with its settings.

    Args:
      call: the other function.
      function: the function.
      change: makes a sharding of the function of one of the other function.
    """

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = named.__qualname__ = call.name
    jitted = jax.jit(
        named,
        in_shardings=tuple(None if s is None else change(s) for s in call.arguments),
        out_shardings=[change(s) if isinstance(s, Sharding) else None for s in call.results],
        donate_argnums=[i for i, donated in enumerate(call.donated) if donated],
        **call.settings,
    )
    structs = [
        jax.ShapeDtypeStruct(
            a.shape, a.dtype, weak_type=a.weak_type, sharding=change(s) if a.sharding.spec else None
        )
        for a, s in zip(call.jaxpr.in_avals, call.arguments, strict=True)
    ]
    moved = read_trace(jitted.trace(*structs))
    return dataclasses.replace(
        moved,
        jaxpr=_with_origin(moved.jaxpr, call.jaxpr),
        argument_names=call.argument_names,
        result_names=call.result_names,
        uncommitted=call.uncommitted,
    )


def _with_origin(jaxpr: Any, other: Any) -> Any:
    """A trace that says that it is of the function of another trace, with its line and names."""
    opened, origin = getattr(jaxpr, 'jaxpr', jaxpr), getattr(other, 'jaxpr', other).debug_info
    traced = opened.replace(debug_info=origin)
    return traced if opened is jaxpr else jaxpr.replace(jaxpr=traced)


def trace_while(lower: Callable[[], Any]) -> TracedCall:
    """The trace of the last function that is lowered inside."""
    seen: list[TracedCall] = []
    owner, name, wrapped = on_lower(lambda computation, call: seen.append(call))
    original = getattr(owner, name)
    setattr(owner, name, wrapped)
    try:
        lower()
    finally:
        setattr(owner, name, original)
    return seen[-1]
