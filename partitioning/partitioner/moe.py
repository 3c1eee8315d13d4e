"""A partitioner for mixtures of experts: an 'expert' axis next to 'data' and 'model'."""

from __future__ import annotations

from typing import Any

from partitioning.hardware import HardwareMesh
from partitioning.mesh import MeshConfig
from partitioning.mesh.validation import check_count
from partitioning.partitioner.pjit import PjitPartitioner
from partitioning.rules import LogicalAxisRules


class MoePjitPartitioner(PjitPartitioner):
    """PjitPartitioner on a ('data', 'expert', 'model') mesh, by T5X's name.

    Usage:
      partitioner = MoePjitPartitioner(num_expert_partitions=8, num_partitions=2)

    Args:
      num_expert_partitions: the size of the 'expert' axis, which is taken out of the data axis. If
        the data axis is smaller, 'expert' takes all of it.
      num_partitions, model_parallel_submesh, params_on_devices, backend, logical_axis_rules: see
        PjitPartitioner.
      **settings: the keyword arguments of PjitPartitioner except `mesh`, which a MeshConfig with
        `num_expert_partitions` can replace: PjitPartitioner(mesh=MeshConfig.from_t5x(...)).

    Raises:
      ValueError: if the sizes of the two axes do not divide each other, and as PjitPartitioner.
    """

    def __init__(
        self,
        num_expert_partitions: int,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        **settings: Any,
    ):
        check_count(num_expert_partitions, 'num_expert_partitions')
        if 'mesh' in settings:
            raise ValueError(
                'MoePjitPartitioner makes its own mesh; write PjitPartitioner(mesh='
                'MeshConfig.from_t5x(num_partitions=..., num_expert_partitions=...)) instead'
            )
        super().__init__(
            params_on_devices=params_on_devices,
            logical_axis_rules=logical_axis_rules,
            mesh=MeshConfig.from_t5x(
                num_partitions=num_partitions,
                model_parallel_submesh=model_parallel_submesh,
                backend=backend,
                num_expert_partitions=num_expert_partitions,
            ),
            **settings,
        )
