"""What the compilers of TPUs and GPUs dump: exchanges by hand, and memory as jax says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_machines import described, needs_cuda_plugin, needs_libtpu
from dumped_programs import EXCHANGED, added_up, exchange, make_mesh, struct
from jax.sharding import Mesh

from meshwright import read_dump


def dump(topology, folder):
    """The program of a folder, and jax's own figures."""
    function, arguments = exchange(make_mesh(described(topology).devices))
    platform = 'tpu' if topology.startswith('v') else 'cuda'
    lowered = function.trace(*arguments).lower(lowering_platforms=(platform,))
    compiled = lowered.compile({'xla_dump_to': str(folder)})
    return read_dump(folder, module='exchanges', chip=topology.split(':')[0]), (
        compiled.memory_analysis()
    )


@needs_cuda_plugin
def test_a_gpu(tmp_path):
    program, sizes = dump('h100:1x8', tmp_path)
    assert (program.back_end, program.stage, program.fits) == ('gpu', 'compiled', True)
    assert added_up(program) == EXCHANGED and program.mesh.sizes == {'data': 4, 'model': 2}
    assert all(c.asynchronous for c in program.collectives)
    memory = program.memory
    assert (memory.arguments, memory.outputs, memory.aliased, memory.temporaries) == (
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
    )
    assert program.peak == pytest.approx(sizes.peak_memory_in_bytes, rel=0.01)
    assert program.peak < memory.arguments + memory.outputs + memory.temporaries


@needs_libtpu
def test_a_tpu(tmp_path):
    """The compiler joins the sum and the scatter over data, of 16 x 16 and 32 x 16 floats."""
    program, sizes = dump('v5e:2x4', tmp_path)
    assert (program.back_end, program.stage, program.fits) == ('tpu', 'compiled', True)
    joined = {
        key: value
        for key, value in EXCHANGED.items()
        if key not in (('all-reduce', ('data',)), ('reduce-scatter', ('data',)))
    }
    joined['all-reduce', ('data',)] = (2 * (1024 + 2048) * 3 / 4, 1)
    assert added_up(program) == joined
    assert program.memory.arguments == sizes.argument_size_in_bytes
    assert program.memory.outputs == sizes.output_size_in_bytes
    assert program.memory.temporaries == pytest.approx(sizes.temp_size_in_bytes, rel=0.2)


@needs_libtpu
def test_two_slices(tmp_path):
    """A device has 128 x 512 floats of the gradient, and sums them with the other slice's."""
    devices = described('v5e:2x2', 2).devices
    mesh = Mesh(np.reshape(devices, (2, 4)), ('replica', 'data'))

    def gradient(weights, batch):
        return jax.grad(lambda weights: jnp.sum((batch @ weights) ** 2))(weights)

    weights = struct(mesh, (512, 512), 'data')
    function = jax.jit(gradient, out_shardings=weights.sharding)
    traced = function.trace(weights, struct(mesh, (64, 512), ('replica', 'data')))
    traced.lower(lowering_platforms=('tpu',)).compile({'xla_dump_to': str(tmp_path)})
    program = read_dump(tmp_path)
    assert (program.num_devices, program.mesh.slices) == (8, {'replica': 2})
    [between] = [c for c in program.collectives if c.network == 'dcn']
    assert (between.kind, between.axes, between.total_bytes) == (
        'all-reduce',
        ('replica',),
        128 * 512 * 4,
    )
    assert {c.axes for c in program.collectives if c.network == 'ici'} == {('data',)}
    with pytest.raises(ValueError, match='has 4 devices, and the program runs on 8'):
        read_dump(tmp_path, mesh={'data': 4})
