"""The settings of a partitioned function, to partition it again on another mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from partitioning.hardware import OptionValue
from partitioning.programs.inner_layouts import is_resource
from partitioning.programs.recompilation import OnRecompile


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """What `partition` was called with.

    Attributes:
      fn: the function.
      in_axis_resources, out_axis_resources, static_argnums, donate_argnums, on_recompile,
        compiler_options: the arguments of `BasePartitioner.partition`.
    """

    fn: Callable[..., Any]
    in_axis_resources: Any
    out_axis_resources: Any
    static_argnums: int | Sequence[int]
    donate_argnums: int | Sequence[int]
    on_recompile: OnRecompile
    compiler_options: Mapping[str, OptionValue] | None

    def on_any_mesh(self) -> PartitionSettings:
        """The settings with the specs of shardings in place of the shardings.

        Raises:
          ValueError: if a resource is a sharding without a spec.
        """
        return dataclasses.replace(
            self,
            in_axis_resources=_without_mesh(self.in_axis_resources),
            out_axis_resources=_without_mesh(self.out_axis_resources),
        )


def settings_of(partitioned: Any) -> PartitionSettings:
    """The settings of a partitioned function.

    Raises:
      ValueError: if no partitioner of this library partitioned it.
    """
    found = getattr(partitioned, '_settings', None)
    if not isinstance(found, PartitionSettings):
        name = getattr(partitioned, '__name__', repr(partitioned))
        raise ValueError(
            f'{name} is not a partitioned function: pass what partitioner.partition(...) returned'
        )
    return found


def _without_mesh(resources: Any) -> Any:
    def spec(resource: Any) -> Any:
        if isinstance(resource, NamedSharding):
            return resource.spec
        if isinstance(resource, Sharding):
            raise ValueError(
                f'{resource!r} has no PartitionSpec, so the function cannot be moved to another '
                'mesh: give specs or NamedShardings to partition'
            )
        return resource

    return jax.tree.map(spec, resources, is_leaf=is_resource)
