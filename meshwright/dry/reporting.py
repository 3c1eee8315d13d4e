"""The forecasts of the functions that a script has compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from meshwright.calls.compiling import Program
from meshwright.calls.other_meshes import finest_mesh
from meshwright.calls.plain_call import list_held
from meshwright.calls.target import target_of_mesh
from meshwright.describing import describe_program
from meshwright.dry.compiling import CompiledFunction
from meshwright.findings.program_findings import Findings, lint_program, with_findings
from meshwright.jax_private import result_shardings
from meshwright.report.figures import hanging
from meshwright.report.forecasts import Forecast

_SMALL = 0.01  # functions with a smaller share of the FLOPs of the largest are left out


def find_steps(functions: Sequence[CompiledFunction]) -> tuple[CompiledFunction, ...]:
    """The functions that a report is about: the largest, and others of comparable size.

    Args:
      functions: all functions that a script has compiled.
    """
    most = max((one.flops for one in functions), default=0)
    return tuple(
        one
        for one in functions
        if one.out_of_memory is not None or (one.flops and one.flops >= _SMALL * most)
    )


def forecast_function(found: CompiledFunction) -> Forecast:
    """The forecast of a function that a script has compiled."""
    call = found.call
    mesh = mesh_of(found)
    target = target_of_mesh(mesh)
    program = Program(
        traced=call,
        compiled=found.executable,
        out_of_memory=found.out_of_memory,
    )
    held = list_held(call, mesh)
    made = describe_program(call.name, program, target, held)
    return with_findings(made, call, mesh, held, results_of(found))


def findings_text(functions: Sequence[CompiledFunction]) -> str:
    """The findings of functions that a script has compiled, each once; '' if there are none."""
    found: dict[tuple[str, str, str], str] = {}
    for one in functions:
        try:
            findings = _lint(one)
        except Exception as error:  # of an operation that nobody has thought of; the run goes on
            why = f'{type(error).__name__}: {error}'.splitlines()[0]
            found[one.name, '', ''] = f'{one.name}: not looked for, because of {why}'
            continue
        for finding in findings:
            found.setdefault((one.name, finding.kind, finding.where), f'{one.name}: {finding}')
    wrapped = map(hanging(100).fill, found.values())
    return '\n'.join(['findings:', *wrapped]) if found else ''


def _lint(found: CompiledFunction) -> Findings:
    mesh = mesh_of(found)
    return lint_program(found.call, mesh, list_held(found.call, mesh), results_of(found))


def results_of(found: CompiledFunction) -> tuple[Any, ...] | None:
    """The sharding of each result as compiled; None without a program."""
    return None if found.executable is None else result_shardings(found.executable)


def mesh_of(found: CompiledFunction) -> Mesh:
    """The largest mesh that a function and its arguments name, or its devices along one axis."""
    meshes = [mesh for mesh in found.call.meshes if isinstance(mesh, Mesh)]
    if meshes:
        return finest_mesh(meshes)
    return Mesh(np.array(found.devices), ('devices',))
