"""A partitioner for mixtures of experts: an 'expert' axis beside 'data' and 'model'."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax.sharding import AxisType, Mesh

from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.mesh import AxisTypes, default_moe_mesh
from partitioning.partitioner.pjit import PjitPartitioner, Plan
from partitioning.rules import LogicalAxisRules, OnIndivisible, OnUnmatched, is_count
from partitioning.state import PathRules


class MoePjitPartitioner(PjitPartitioner):
    """PjitPartitioner on a ('data', 'expert', 'model') mesh, by T5X's name.

    Usage:
      partitioner = MoePjitPartitioner(num_expert_partitions=8, num_partitions=2)
    """

    def __init__(
        self,
        num_expert_partitions: int,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        *,
        devices: Sequence[JaxDevice] | None = None,
        axis_types: AxisTypes = AxisType.Auto,
        granule_size: int | None = None,
        optimizer_axis_rules: LogicalAxisRules | None = None,
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
        params_axes_names_override: PathRules = (),
        plan: Plan | None = None,
    ):
        """Args as those of PjitPartitioner by these names, and:
        num_expert_partitions: size of the 'expert' axis, taken out of the data axis; where that is
          smaller, all of it.
        """
        super().__init__(
            num_partitions=num_partitions,
            model_parallel_submesh=model_parallel_submesh,
            params_on_devices=params_on_devices,
            backend=backend,
            logical_axis_rules=logical_axis_rules,
            devices=devices,
            axis_types=axis_types,
            granule_size=granule_size,
            optimizer_axis_rules=optimizer_axis_rules,
            on_unmatched=on_unmatched,
            on_indivisible=on_indivisible,
            params_axes_names_override=params_axes_names_override,
            plan=plan,
        )
        if not is_count(num_expert_partitions):
            raise ValueError(
                f'num_expert_partitions={num_expert_partitions!r} must be a whole number, 1 or more'
            )
        self._num_expert_partitions = num_expert_partitions

    @functools.cached_property
    def mesh(self) -> Mesh:
        settings = self._mesh_settings
        return default_moe_mesh(
            self._num_expert_partitions,
            settings['num_partitions'],
            settings['model_parallel_submesh'],
            settings['backend'],
            devices=settings['devices'],
            axis_types=settings['axis_types'],
            granule_size=settings['granule_size'],
        )
