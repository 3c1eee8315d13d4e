"""Audits the layouts of the arguments and results of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.calls.compiled_call import check_no_trace_needed, is_compiled, read_compiled
from meshwright.calls.held import HeldArray
from meshwright.calls.plain_call import hold, parts_of_name
from meshwright.calls.target import target_of_mesh
from meshwright.examining import examine
from meshwright.jax_private import TracedCall
from meshwright.report.call_audit import CallAudit, audit_arrays
from partitioning.rules import MeshLike
from partitioning.tracebacks import hide_own_frames


@hide_own_frames
def audit(fn: Any, *args: Any, compile: bool = True, **settings: Any) -> CallAudit:
    """Returns what each device holds of the arguments and results of a call, by role and by array.

    Usage:
      print(mw.audit(train_step, state, batch))
      held = mw.audit(train_step, state, batch).bytes_per_device['optimizer']

    Args:
      fn, *args: a function and the arguments of a call, as for `forecast`.
      compile: whether to compile, which tells the layouts of results that the function does not
        state.
      **settings: `topology`, `num_slices`, `axes`, `compiler_options`, `on_cpu` and `progress`, as
        for `forecast`.

    Raises:
      ValueError: as in `forecast`.
    """
    if is_compiled(fn):
        check_no_trace_needed(
            fn, args, topology=settings.get('topology'), axes=settings.get('axes'), compile=compile
        )
        made = read_compiled(fn)
        results = [
            hold(path, x, sharding, made.mesh, noun='result') for path, x, sharding in made.results
        ]
        machine = target_of_mesh(made.mesh).topology
        return audit_arrays(made.name, machine, made.mesh, made.held, results)
    examined = examine(fn, args, compile=compile, **settings)
    traced, mesh = examined.program.traced, examined.target.mesh
    found = list_results(traced, examined.results, mesh)
    return audit_arrays(examined.call.name, examined.target.topology, mesh, examined.held, found)


def list_results(
    traced: TracedCall, shardings: Sequence[Any], mesh: MeshLike
) -> tuple[HeldArray, ...]:
    """The arrays of the results of a call whose layout is known.

    Args:
      traced: the function.
      shardings: the sharding of each result; None where it is not known.
      mesh: the mesh.
    """
    outputs = zip(traced.result_names, traced.jaxpr.out_avals, shardings, strict=True)
    return tuple(
        hold(parts_of_name(name), aval, sharding, mesh, noun='result')
        for name, aval, sharding in outputs
        if hasattr(sharding, 'device_set') and hasattr(aval, 'dtype')
    )
