"""A partitioner for mixtures of experts: an 'expert' axis beside 'data' and 'model'."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax.sharding import Mesh

from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.mesh import default_moe_mesh
from partitioning.partitioner.pjit import PjitPartitioner
from partitioning.rules import LogicalAxisRules


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
    ):
        """Args as those of PjitPartitioner, and:
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
        )
        self._num_expert_partitions = num_expert_partitions

    @functools.cached_property
    def mesh(self) -> Mesh:
        return default_moe_mesh(
            self._num_expert_partitions,
            self._mesh_settings['num_partitions'],
            self._mesh_settings['model_parallel_submesh'],
            self._mesh_settings['backend'],
            devices=self._mesh_settings['devices'],
        )
