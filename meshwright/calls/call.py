"""A function with the arguments of one call, from which a forecast is made."""

from __future__ import annotations

from typing import Any, Protocol, Self

from jax.sharding import AbstractMesh, Mesh

from meshwright.calls.held import HeldArray
from meshwright.calls.partitioned import is_partitioned, laid_out_for
from meshwright.calls.partitioned_call import PartitionedCall
from meshwright.calls.plain_call import PlainCall
from meshwright.jax_private import TracedCall
from partitioning.mesh import MeshConfig
from partitioning.rules import LogicalAxisRules


class Call(Protocol):
    """A call of a function, on the machine of its mesh or moved to another one.

    Attributes:
      args: the arguments, abstract or not.
      name: the name of the function.
      mesh: the mesh that it runs on.
      mesh_source: the mesh, or its description, which may need more devices than there are.
      rules: the logical axis rules under which the function is traced.
      batch_axes: the mesh axes of the batch; empty if they are not known.
    """

    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def name(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def mesh_source(self) -> Mesh | AbstractMesh | MeshConfig: ...
    @property
    def rules(self) -> LogicalAxisRules: ...
    @property
    def batch_axes(self) -> tuple[str, ...]: ...
    def argument_name(self, index: int, /) -> str: ...
    def trace(self) -> TracedCall: ...
    def held(self, traced: TracedCall, /) -> tuple[HeldArray, ...]: ...
    def with_args(self, args: tuple[Any, ...], /) -> Self: ...
    def on(self, mesh: Mesh, /, *, with_options: bool = True) -> Self: ...


def read_call(fn: Any, args: tuple[Any, ...]) -> Call:
    """The call of a function, which may be partitioned, jitted or traced.

    Args:
      fn: what a partitioner, `jax.jit`, `nnx.jit` or `eqx.filter_jit` returned, or what `trace` of
        one of them returned.
      args: the arguments of the call.

    Raises:
      ValueError: if the function is not jitted.
    """
    if is_partitioned(fn):
        return PartitionedCall(laid_out_for(fn, args), args)
    return PlainCall(fn, args)
