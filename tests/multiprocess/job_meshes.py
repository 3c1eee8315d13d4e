"""Reports the meshes of all devices that one process makes."""

import jax.numpy as jnp

from partitioning import PjitPartitioner, axis_rings, create_hybrid_mesh, create_mesh, default_mesh


def run(count):
    """Reports the devices and networks of each mesh."""
    meshes = {f'default {n}': default_mesh(n) for n in (1, 2, 4, 8)}
    meshes['create'] = create_mesh((2, 2, 2), ('data', 'fsdp', 'model'))
    meshes['hybrid'] = create_hybrid_mesh((8 // count, 1), (1, count), ('data', 'model'))
    return {
        name: {
            'ids': [[d.process_index, d.id] for d in mesh.devices.flat],
            'shape': list(mesh.devices.shape),
            'networks': [ring.network for ring in axis_rings(mesh)],
        }
        for name, mesh in meshes.items()
    }


def sum_over_all_devices():
    """Returns a sum over a global array. Each process computes its own shards of the array."""
    partitioner = PjitPartitioner(num_partitions=2)
    spec = partitioner.data_partition_spec
    rows = partitioner.partition(lambda: jnp.arange(8.0), None, spec)()
    return float(partitioner.partition(jnp.sum, spec, None)(rows))
