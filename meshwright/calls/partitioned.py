"""What forecasts read from a partitioner and from a function that it has partitioned.

The types are protocols, so that any partitioner with these attributes can be used, and so that
`meshwright` does not import the partitioners of `partitioning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from partitioning.hardware import OptionValue
from partitioning.mesh import MeshConfig
from partitioning.plan import Plan
from partitioning.rules import LogicalAxisRules


class PartitionerLike(Protocol):
    """A partitioner, such as `partitioning.PjitPartitioner`."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def mesh_source(self) -> Mesh | AbstractMesh | MeshConfig: ...
    @property
    def logical_axis_rules(self) -> LogicalAxisRules: ...
    @property
    def data_partition_spec(self) -> PartitionSpec: ...
    def plan(self, init_or_state: Any, /, *args: Any) -> Plan: ...
    def partition(
        self,
        fn: Callable[..., Any],
        in_shardings: Any,
        out_shardings: Any,
        /,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
        *,
        on_recompile: Any = 'allow',
        compiler_options: Mapping[str, OptionValue] | None = None,
    ) -> PartitionedLike: ...


class PartitionerWithRules(PartitionerLike, Protocol):
    """A partitioner whose rules can be replaced."""

    def with_rules(self, logical_axis_rules: LogicalAxisRules, /) -> Self: ...


class PartitionedLike(Protocol):
    """A function that a partitioner has partitioned."""

    @property
    def boundary(self) -> BoundaryLike: ...
    @property
    def settings(self) -> SettingsLike: ...
    @property
    def partitioner(self) -> PartitionerLike: ...
    def trace(self, *args: Any) -> jax.stages.Traced: ...


class BoundaryLike(Protocol):
    """The arguments of a partitioned function, with their layouts."""

    @property
    def arguments(self) -> SignatureLike: ...
    @property
    def mesh(self) -> Mesh: ...
    def dynamic(self, args: Sequence[Any], /) -> Sequence[ArgumentLike]: ...


class SignatureLike(Protocol):
    """The name of a function, and the names of its arguments by their positions."""

    @property
    def function(self) -> str: ...
    def name(self, index: int, /) -> str: ...


class ArgumentLike(Protocol):
    """An argument of a call that is not static; `pairs` yields its arrays with their shardings."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> Any: ...
    def pairs(self) -> Iterator[tuple[tuple[Any, ...], Any, Any]]: ...


class SettingsLike(Protocol):
    """The arguments that `partition` was called with."""

    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def in_shardings(self) -> Any: ...
    @property
    def out_shardings(self) -> Any: ...
    @property
    def static_argnums(self) -> int | Sequence[int]: ...
    @property
    def donate_argnums(self) -> int | Sequence[int]: ...
    @property
    def on_recompile(self) -> Any: ...
    @property
    def compiler_options(self) -> Mapping[str, OptionValue] | None: ...
    def on_any_mesh(self) -> Self: ...


def laid_out_for(fn: Any, args: Sequence[Any]) -> Any:
    """The function, or the partitioned function in it that is laid out for these arguments.

    The step of `PjitPartitioner.setup` lays out a batch when it first sees one.
    """
    lay_out = getattr(fn, 'for_arguments', None)
    return fn if lay_out is None else lay_out(*args)


def is_partitioned(fn: Any) -> bool:
    """Whether a partitioner has partitioned a function."""
    return hasattr(fn, 'boundary') and hasattr(fn, 'settings')
