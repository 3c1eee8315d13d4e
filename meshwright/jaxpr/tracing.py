"""Traces a partitioned function and lays out all of its arrays. Nothing is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshwright.jax_private import TracedCall, read_trace
from meshwright.jaxpr.implied_exchanges import insert_exchanges, merge_exchanges
from meshwright.jaxpr.layouts import propagate
from meshwright.jaxpr.values import Block, Step, Value
from meshwright.jaxpr.writing_out import remove_unused, spec_axes, write_out
from meshwright.program.costs import mesh_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """A traced function whose arrays are laid out over a mesh.

    Attributes:
      jaxpr: its ClosedJaxpr.
      block: its steps, with the exchanges of data that its layouts imply.
      axis_sizes: the size of each mesh axis.
      slices: the number of slices along axes that span several.
      donated: for each array of the arguments, whether the results may replace it.
      unknown: the primitives that no rule describes: their results are laid out like operands
        of the same shape, and are otherwise whole on every device.
    """

    jaxpr: Any
    block: Block
    axis_sizes: Mapping[str, int]
    slices: Mapping[str, int]
    donated: tuple[bool, ...]
    unknown: tuple[str, ...]


def trace_function(
    partitioned: Any,
    *abstract_args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    slices: Mapping[str, int] | None = None,
) -> TracedProgram:
    """Traces a function over a mesh, and lays out its arrays as its arguments and constraints say.

    Args:
      partitioned: a partitioned function, or any function from `jax.jit`.
      *abstract_args: its arguments, or their ShapeDtypeStructs. Their shardings count where the
        function has none.
      mesh: the mesh, by default the mesh of the shardings. It may be abstract.
      slices: the number of slices along axes that span several, by default the mesh's.

    Raises:
      ValueError: if neither the function nor its arguments name a mesh.
    """
    traced = read_trace(partitioned.trace(*abstract_args))
    return lay_out_trace(traced, mesh, slices)


def lay_out_trace(
    traced: TracedCall,
    mesh: Mesh | AbstractMesh | None = None,
    slices: Mapping[str, int] | None = None,
) -> TracedProgram:
    """Lays out the arrays of a function that has been traced; see `trace_function`."""
    found = [*traced.arguments, *traced.results]
    mesh = mesh or next((s.mesh for s in found if isinstance(s, NamedSharding)), None)
    if mesh is None:
        raise ValueError(
            'the function has no mesh: neither it nor its arguments have a NamedSharding; pass '
            'mesh=, or arguments with shardings'
        )
    sizes = dict(mesh.shape)
    block = write_out(traced.jaxpr, sizes)
    _fix(block.inputs, traced.arguments, sizes)
    for value in block.inputs:
        value.fixed = [True] * len(value.shape)
    _state_results(block, traced.results, sizes)
    propagate(block, sizes)
    unknown = insert_exchanges(block, sizes)
    remove_unused(block)
    merge_exchanges(block)
    if slices is None:
        slices = mesh_axes(mesh).slices if isinstance(mesh, Mesh) else {}
    return TracedProgram(
        jaxpr=traced.jaxpr,
        block=block,
        axis_sizes=sizes,
        slices=slices,
        donated=traced.donated,
        unknown=unknown,
    )


def _fix(values: Sequence[Value], shardings: Sequence[Any], sizes: Mapping[str, int]) -> None:
    for value, sharding in zip(values, shardings, strict=True):
        if isinstance(sharding, NamedSharding):
            value.fix(spec_axes(sharding.spec, len(value.shape), sizes))


def _state_results(block: Block, shardings: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Adds the layouts of results as constraints, as a result may be used inside the function."""
    for i, (value, sharding) in enumerate(zip(block.outputs, shardings, strict=True)):
        if isinstance(sharding, NamedSharding):
            rank = len(value.shape)
            result = dataclasses.replace(value, axes=[None] * rank, fixed=[False] * rank)
            _fix([result], [sharding], sizes)
            block.steps.append(Step('sharding_constraint', {}, [value], [result]))
            block.outputs[i] = result
