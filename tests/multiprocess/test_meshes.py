"""Meshes of real CPU processes: all of them see the same one, 'model' inside a process first."""

import numpy as np
import pytest
from processes import what_they_say

# Eight devices in all. Each process prints its meshes, and what a sum over one of them gives.
PROGRAM = """
import sys
import jax
from processes import say
import jax.numpy as jnp

port, count, index = map(int, sys.argv[1:])
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8 // count)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'127.0.0.1:{port}', count, index)

from jax.sharding import NamedSharding, PartitionSpec as P
from partitioning import (
    PjitPartitioner, axis_rings, create_hybrid_mesh, create_mesh, default_mesh
)

names = ('data', 'fsdp', 'model')
meshes = {f'default {n}': default_mesh(n) for n in (1, 2, 4, 8)}
meshes['create'] = create_mesh((2, 2, 2), names)
meshes['hybrid'] = create_hybrid_mesh((8 // count, 1), (1, count), ('data', 'model'))
said = {
    name: {
        'ids': [[d.process_index, d.id] for d in mesh.devices.flat],
        'shape': list(mesh.devices.shape),
        'networks': [ring.network for ring in axis_rings(mesh)],
    }
    for name, mesh in meshes.items()
}
partitioner = PjitPartitioner(num_partitions=2)
rows = partitioner.partition(lambda: jnp.arange(8.0), None, partitioner.data_partition_spec)()
said['sum'] = float(partitioner.partition(jnp.sum, partitioner.data_partition_spec, None)(rows))
said['layout'] = [partitioner.get_data_layout(8).shard_id, partitioner.data_shards]
say(said)
"""


@pytest.mark.parametrize('count', [2, 4, 8])
def test_meshes_of_processes(count):
    said = what_they_say(PROGRAM, count)
    local = 8 // count
    for one in said[1:]:
        assert {k: v for k, v in one.items() if k != 'layout'} == {
            k: v for k, v in said[0].items() if k != 'layout'
        }, 'all processes see the same meshes'
    assert said[0]['sum'] == 28.0
    for name in ('default 1', 'default 2', 'default 4', 'default 8', 'create', 'hybrid'):
        mesh = said[0][name]
        owners = np.array([process for process, _ in mesh['ids']]).reshape(mesh['shape'])
        assert len({number for _, number in mesh['ids']}) == 8
        if name == 'hybrid':  # 'model' over the processes, as asked
            assert owners.tolist() == [list(range(count))] * local
            continue
        model = mesh['shape'][-1]
        groups = owners.reshape(-1, model)
        # A group stays in a process while it fits, else it takes whole processes.
        assert all(len(set(group)) == max(1, model // local) for group in groups.tolist()), name
        network = '-' if model == 1 else 'memory' if model <= local else None
        assert network is None or mesh['networks'][-1] == network, name
    # data 4: a process reads its part of the rows, those of one data group the same part.
    shards = min(count, 4)
    assert [one['layout'] for one in said] == [
        [index * shards // count, shards] for index in range(count)
    ]
