"""Partitioners on jax.jit: a mesh, rules, and functions partitioned by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import AxisType, Mesh, PartitionSpec

from partitioning import state as state_lib
from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.layout import LocalChunker
from partitioning.mesh import AxisTypes, default_mesh
from partitioning.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    partition_function,
    to_shardings,
)
from partitioning.partitioner.base import BasePartitioner, TrainState
from partitioning.rules import (
    STANDARD_MESH_AXES,
    AxisNames,
    LogicalAxisRules,
    MeshAxes,
    as_tuple,
    check_rules,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)


class BasePjitPartitioner(BasePartitioner):
    """A partitioner on `jax.jit`, without logical axis rules."""

    @functools.cached_property
    def _local_chunker(self) -> LocalChunker:
        return LocalChunker(self.mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        if self._given_mesh is not None:
            return self._given_mesh
        return default_mesh(**self._mesh_settings)

    @property
    def logical_axis_rules(self) -> LogicalAxisRules:
        """The rules that functions are traced under."""
        return ()

    def get_mesh_axes(self, train_state: TrainState) -> Any:
        raise ValueError(
            f'{type(self).__name__} has no logical axis rules to map a state by: use '
            'PjitPartitioner'
        )

    def partition(
        self,
        fn: Callable[..., Any],
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> PartitionedCallable:
        return partition_function(
            fn,
            self.mesh,
            self.logical_axis_rules,
            in_shardings=to_shardings(in_axis_resources, self.mesh),
            out_shardings=to_shardings(out_axis_resources, self.mesh),
            static_argnums=_as_indices(static_argnums),
            donate_argnums=_as_indices(donate_argnums),
        )

    def compile(
        self, partitioned_fn: PartitionedCallable, *args: Any
    ) -> CompiledPartitionedCallable:
        return partitioned_fn.lower(*args).compile()  # type: ignore[attr-defined]


class PjitPartitioner(BasePjitPartitioner):
    """A partitioner by logical axis rules, on `jax.jit`.

    Usage:
      partitioner = PjitPartitioner(num_partitions=2)
      axes = partitioner.get_mesh_axes(jax.eval_shape(init, key))
      state = partitioner.partition(init, None, axes)(key)
      step = partitioner.partition(
          step, (axes, partitioner.data_partition_spec), (axes, None), donate_argnums=0)
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        *,
        devices: Sequence[JaxDevice] | None = None,
        mesh_axis_names: Sequence[str] | None = None,
        axis_types: AxisTypes = AxisType.Auto,
        granule_size: int | None = None,
        mesh: Mesh | None = None,
    ):
        """Args as those of BasePartitioner, and:
        logical_axis_rules: (logical axis, mesh axis or axes or None) pairs in order of priority; by
          default `standard_logical_axis_rules` for the axes of the mesh. Where the partitioner
          makes an axis for the slices, a rule of 'batch' that has 'data' gets that axis too.
        """
        super().__init__(
            num_partitions=num_partitions,
            model_parallel_submesh=model_parallel_submesh,
            params_on_devices=params_on_devices,
            backend=backend,
            ici_mesh_shape=ici_mesh_shape,
            dcn_mesh_shape=dcn_mesh_shape,
            devices=devices,
            mesh_axis_names=mesh_axis_names,
            axis_types=axis_types,
            granule_size=granule_size,
            mesh=mesh,
        )
        self._given_rules = None if logical_axis_rules is None else check_rules(logical_axis_rules)

    @functools.cached_property
    def logical_axis_rules(self) -> LogicalAxisRules:
        if self._given_rules is None:
            # None that leave an axis unused: with no rules get_mesh_axes and constrain raise.
            axes = self._axes_in_use
            known = set(axes) <= set(STANDARD_MESH_AXES)
            return check_rules(standard_logical_axis_rules(mesh_axes=axes)) if known else ()
        if self._given_mesh is not None:
            return self._given_rules
        slices = self._axis_of_slices
        return tuple(_over_slices(rule, slices) for rule in self._given_rules)

    @property
    def _axes_in_use(self) -> list[str]:
        sizes = self.mesh.shape
        return [a for a in self.mesh.axis_names if sizes[a] > 1 or a in STANDARD_MESH_AXES]

    @functools.cached_property
    def _data_axis(self) -> MeshAxes:
        self._check_default_rules()
        batch = logical_to_mesh_axes(['batch'], self.logical_axis_rules, on_unmatched='replicate')
        axes = batch[0] if batch else None
        if (slices := self._axis_of_slices) is not None and slices not in as_tuple(axes):
            logging.warning(
                "'batch' is sharded over %s: each of the %d parts of %r computes the same rows",
                axes,
                self.mesh.shape[slices],
                slices,
            )
        return axes

    def _check_default_rules(self) -> None:
        """Rules that were not chosen must not leave a mesh axis without use."""
        if self._given_rules is None:
            standard_logical_axis_rules(mesh_axes=self._axes_in_use)

    def get_mesh_axes(self, train_state: TrainState) -> Any:
        """The state with a PartitionSpec for every array.

        Args:
          train_state: a pytree, abstract or not; see `get_logical_axes`.

        Raises:
          ValueError: with the path of the first array whose layout the rules do not decide, or
            that its mesh axes do not divide.
        """
        self._check_default_rules()
        if hasattr(train_state, 'as_logical_axes'):
            return jax.tree_util.tree_map_with_path(
                lambda path, names: self._spec(state_lib.path_str(path), names, None),
                train_state.as_logical_axes(),
                is_leaf=lambda x: x is None or isinstance(x, AxisNames),
            )
        leaves, treedef = state_lib.leaf_axes(train_state)
        # A leaf takes its axes from its parameter's spec: names resolved apart from the others
        # could win mesh axes that the parameter has elsewhere.
        specs = [
            PartitionSpec(*leaf.pick(tuple(self._spec(leaf.path, leaf.names, leaf.shape) or ())))
            for leaf in leaves
        ]
        return jax.tree_util.tree_unflatten(treedef, specs)

    def _spec(
        self, name: str, names: Sequence[str | None] | None, shape: Sequence[int] | None
    ) -> PartitionSpec | None:
        try:
            return logical_to_mesh_axes(
                names, self.logical_axis_rules, axis_sizes=self.mesh.shape, shape=shape
            )
        except ValueError as error:
            raise ValueError(f'Failed to map logical axes for {name}: {error}') from error


def _over_slices(rule: tuple[str, MeshAxes], slices: str | None) -> tuple[str, MeshAxes]:
    """The rule of the batch with the axis of the slices before its own."""
    name, axes = rule[0], as_tuple(rule[1])
    if name != 'batch' or slices is None or slices in axes or 'data' not in axes:
        return rule
    return name, (slices, *axes)


def _as_indices(indices: int | Sequence[int]) -> tuple[int, ...]:
    return (indices,) if isinstance(indices, int) else tuple(indices)
