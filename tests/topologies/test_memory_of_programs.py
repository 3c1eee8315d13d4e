"""What described machines are compiled for: their memory, and options that their compilers know."""

import jax
import jax.numpy as jnp
import pytest
from described_machines import described, needs_cuda_plugin, needs_libtpu

from partitioning import CHIPS, MeshConfig, PjitPartitioner
from partitioning.hardware import default_options, option_values
from partitioning.hardware.compiler_errors import OutOfMemoryError


def partitioner_for(topology):
    devices = described(topology).devices
    return PjitPartitioner(
        mesh=MeshConfig(axes={'data': len(devices), 'model': 1}, devices=devices)
    )


def triple(x):
    return 3 * x


@pytest.mark.parametrize(
    'topology',
    [
        pytest.param('v5e:2x2', marks=needs_libtpu),
        pytest.param('h100:1x8', marks=needs_cuda_plugin),
    ],
)
def test_a_program_that_does_not_fit_is_one_line_and_default_options_are_known(topology):
    """The argument and the result are replicated: each has 40 GiB of float32."""
    partitioner = partitioner_for(topology)
    devices = partitioner.mesh.devices.flat
    options = option_values(default_options(devices))
    tripled = partitioner.partition(triple, (None,), None, compiler_options=options)
    partitioner.compile(tripled, jax.ShapeDtypeStruct((8, 128), jnp.float32))

    x = jax.ShapeDtypeStruct((40 * 2**20, 256), jnp.float32)
    with pytest.raises(OutOfMemoryError, match=r'^triple needs 80\.\d+ GiB') as caught:
        partitioner.compile(tripled, x)
    chip = CHIPS[topology.split(':')[0]]
    assert caught.value.available == pytest.approx(chip.hbm_bytes, rel=1e-3)
    assert '\n' not in str(caught.value)
