"""Partitions functions: checks the settings, and makes the function that users call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jax.sharding import Mesh

from partitioning.hardware import OptionValue, check_options
from partitioning.programs.arguments import Arguments
from partitioning.programs.boundary import Boundary
from partitioning.programs.donation import check_donation
from partitioning.programs.inner_layouts import lay_out_inside
from partitioning.programs.partitioned import PartitionedCallable
from partitioning.programs.partitioned_methods import PartitionedMethods
from partitioning.programs.recompilation import OnRecompile, TraceLog, observe
from partitioning.programs.resources import check_entries, check_not_both, to_shardings
from partitioning.programs.settings import PartitionSettings
from partitioning.rules import LogicalAxisRules


def partition_function(
    fn: Callable[..., Any],
    mesh: Mesh,
    logical_axis_rules: LogicalAxisRules,
    *,
    in_resources: Any,
    out_resources: Any,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    on_recompile: OnRecompile = 'allow',
    compiler_options: Mapping[str, OptionValue] | None = None,
    gradient_rules: LogicalAxisRules | None = None,
) -> PartitionedCallable:
    """A function jitted over a mesh; see `BasePartitioner.partition`.

    A call costs what a call of the plain `jax.jit` of the function costs, on a mesh of any size:
    the contexts are entered only while the function is traced, and errors are explained after they
    are raised. The result is a function with attributes, because an object with `__call__` would be
    3% slower at dispatching to 8 devices.

    Args:
      fn: the function.
      mesh: the mesh.
      logical_axis_rules: rules for the linen models and `constrain` calls inside.
      in_resources, out_resources: the layouts of arguments and results.
      static_argnums, donate_argnums, on_recompile, compiler_options: as for `partition`.
      gradient_rules: the rules by which `multiply` scatters gradients, if they differ.

    Returns:
      The function, with the methods of PjittedFnWithContext: `lower`, `lower_and_compile`,
      `trace`, `eval_shape` and `clear_cache`; and with `num_traces` and `num_compilations`.

    Raises:
      ValueError: if a setting does not fit the signature of the function.
    """
    boundary, in_resources = _check(
        fn, mesh, in_resources, out_resources, static_argnums, donate_argnums
    )
    trace_log = TraceLog(boundary.arguments, boundary.static, on_recompile)
    body = observe(fn, trace_log)
    body = lay_out_inside(body, mesh, in_resources, out_resources, boundary.static)
    partitioned = PartitionedMethods(
        body,
        logical_axis_rules,
        boundary,
        trace_log,
        check_options(compiler_options),
        gradient_rules,
    )
    call = _with_explained_errors(partitioned)
    functools.update_wrapper(call, fn)
    methods = ['lower', 'lower_and_compile', 'trace', 'eval_shape']
    methods += ['clear_cache', 'num_traces', 'num_compilations']
    call.__dict__.update({name: getattr(partitioned, name) for name in methods})
    call.__dict__['_partitioned'] = partitioned
    call.__dict__['_settings'] = PartitionSettings(
        fn=fn,
        in_axis_resources=in_resources,
        out_axis_resources=out_resources,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
        on_recompile=on_recompile,
        compiler_options=compiler_options,
    )
    return cast(PartitionedCallable, call)


def _check(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_resources: Any,
    out_resources: Any,
    static_argnums: int | Sequence[int],
    donate_argnums: int | Sequence[int],
) -> tuple[Boundary, Any]:
    """The boundary of a function, and `in_resources` as a tuple if it is a list."""
    arguments = Arguments(fn)
    static = arguments.check_indices(static_argnums, 'static_argnums')
    donated = arguments.check_indices(donate_argnums, 'donate_argnums')
    check_not_both(arguments, static, donated)
    in_resources = tuple(in_resources) if isinstance(in_resources, list) else in_resources
    check_entries(arguments, in_resources, static)
    boundary = Boundary(
        arguments=arguments,
        mesh=mesh,
        in_shardings=to_shardings(in_resources, mesh, allow_unconstrained=True),
        out_shardings=to_shardings(out_resources, mesh, allow_unconstrained=True),
        static=static,
        donated=donated,
    )
    return boundary, in_resources


def _with_explained_errors(partitioned: PartitionedMethods) -> Callable[..., Any]:
    """The function that users call. Its try block costs nothing unless an exception is raised."""
    boundary = partitioned.boundary
    watched = _watched_argument(boundary)
    last = 0
    dispatch: Any = partitioned._pjitted_fn
    jitted = dispatch

    def first(*args: Any) -> Any:
        nonlocal dispatch
        check_donation(boundary, args)
        dispatch = jitted
        return jitted(*args)

    if boundary.donated:
        dispatch = first

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal dispatch, jitted, last
        if kwargs:
            return partitioned(*args, **kwargs)
        try:
            if watched is not None and watched < len(args):
                given = id(args[watched])
                if given == last:
                    check_donation(boundary, args)
                last = given
            return dispatch(*args)
        except Exception as error:
            if isinstance(error, ValueError) and jitted is partitioned._pjitted_fn:
                partitioned.adopt_static_fields(args)
            if jitted is partitioned._pjitted_fn:
                partitioned.raise_cause(error, args, kwargs)
                raise
        dispatch = jitted = partitioned._pjitted_fn
        return partitioned(*args)

    return call


def _watched_argument(boundary: Boundary) -> int | None:
    """The donated argument that is compared with that of the previous call.

    On CPU, jaxlib 0.10 crashes if a donated array is used again. Elsewhere jax raises an error.
    """
    if not boundary.donated or not isinstance(boundary.mesh, Mesh):
        return None
    device = boundary.mesh.devices.flat[0]
    return boundary.donated[0] if getattr(device, 'platform', None) == 'cpu' else None
