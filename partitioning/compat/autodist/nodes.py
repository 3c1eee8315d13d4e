"""What a strategy says of one variable, and of all."""

from __future__ import annotations

import dataclasses
from typing import Literal

from partitioning.compat.autodist.partitioner_config import PartitionerConfig
from partitioning.compat.autodist.placement import check_servers
from partitioning.compat.autodist.splits import check_sparse_axis, split_sizes
from partitioning.compat.autodist.variables import Variable

Synchronizer = Literal['PS', 'AllReduce']


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One variable of a strategy.

    Attributes:
      variable: what it is.
      partitioner: how it is cut, '2,1'; empty: it is whole.
      synchronizer: what makes one gradient of those of all replicas: parameter servers, or an
        all-reduce.
      servers: the server of each shard, under 'PS'.
      groups: the collective group of each shard, under 'AllReduce'.
      local_replication: whether AutoDist would keep a copy beside each replica, under 'PS'.
    """

    variable: Variable
    partitioner: str = ''
    synchronizer: Synchronizer
    servers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    local_replication: bool = False

    def __post_init__(self) -> None:
        self._check_cut()
        self._check_synchronizer()

    @property
    def config(self) -> PartitionerConfig | None:
        """How it is cut; None: it is whole."""
        return PartitionerConfig(partition_str=self.partitioner) if self.partitioner else None

    @property
    def num_shards(self) -> int:
        """In how many shards it is cut."""
        return 1 if self.config is None else self.config.num_shards

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Of each shard, along the dimension that is cut; of a whole variable, nothing."""
        if (config := self.config) is None:
            return ()
        return split_sizes(self.variable.shape[config.axis], config.num_shards)

    def _check_cut(self) -> None:
        """Raises ValueError for a variable that cannot be cut so."""
        if (config := self.config) is None:
            return
        name, shape = self.variable.name, self.variable.shape
        if len(config.partition_list) != len(shape):
            raise ValueError(
                f'{name}: partitioner {self.partitioner!r} is not for an array of shape {shape}'
            )
        if self.variable.sparse:
            check_sparse_axis(config.axis, name)
        split_sizes(shape[config.axis], config.num_shards)

    def _check_synchronizer(self) -> None:
        """Raises ValueError unless each shard has a server, or each a group."""
        name, shards = self.variable.name, self.num_shards
        if self.synchronizer not in ('PS', 'AllReduce'):
            raise ValueError(
                f"{name}: synchronizer {self.synchronizer!r} is neither 'PS' nor 'AllReduce'"
            )
        servers, groups = (shards, 0) if self.synchronizer == 'PS' else (0, shards)
        if (len(self.servers), len(self.groups)) != (servers, groups):
            raise ValueError(
                f'{name}: {self.synchronizer} of {shards} shards has {servers} servers and '
                f'{groups} groups, not {self.servers} and {self.groups}'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """What a strategy says of all variables.

    Attributes:
      planner: who has made it, 'PartitionedPS'.
      servers: the parameter servers, used or not.
    """

    planner: str
    servers: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, 'servers', check_servers(self.servers))
