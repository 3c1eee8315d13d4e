"""Steps of training, compiled for 4 devices of 'data' times 2 of 'model'."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright import read_costs
from meshwright.causes import CompiledFunction, compile_partitioned, describe_arguments
from partitioning import PjitPartitioner
from partitioning.mesh import MeshConfig

ROWS = PartitionSpec('data')


def make_mesh():
    return Mesh(np.reshape(jax.devices(), (4, 2)), ('data', 'model'))


@functools.cache
def mesh_of(**axes):
    """The mesh of all devices with these axes, such as data=4, model=2."""
    types = (AxisType.Auto,) * len(axes)
    return Mesh(np.reshape(jax.devices(), [*axes.values()]), [*axes], axis_types=types)


def struct(mesh, shape, *spec, dtype='float32'):
    """An abstract array that is laid out on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def line_of(function, text):
    """The end of 'file:line' of the only line of a function that contains a text."""
    lines, start = inspect.getsourcelines(function)
    (found,) = [start + i for i, line in enumerate(lines) if text in line]
    return f'{Path(inspect.getsourcefile(function)).name}:{found}'


def compile_plain(step, mesh, parameters, batch, rows=ROWS):
    """A step without a partitioner: of parameters, {name: (shape, spec)}, and a batch."""
    shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in parameters.items()}
    arrays = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, (shape, _) in parameters.items()}
    layouts = (shardings, jax.tree.map(lambda _: NamedSharding(mesh, rows), batch))
    jitted = jax.jit(step, in_shardings=layouts, out_shardings=shardings, donate_argnums=0)
    with jax.set_mesh(mesh):
        traced = jitted.trace(arrays, batch)
        compiled = traced.lower().compile()
    costs, described = read_costs(compiled, mesh), describe_arguments(traced, compiled)
    return CompiledFunction(
        traced=traced, compiled=compiled, costs=costs, mesh=mesh, rows=described
    )


def compile_under(rules, init, step, batch):
    """A step under logical axis rules, of the state of `init`, whose leaves have names."""
    mesh = MeshConfig(axes={'data': 4, 'model': 2})
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    plan = partitioner.plan(init)
    specs = plan.specs, partitioner.data_partition_spec
    partitioned = partitioner.partition(step, specs, plan.specs)
    return compile_partitioned(partitioner, partitioned, plan.abstract_state, batch)
