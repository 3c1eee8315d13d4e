"""What the compilers of described machines make of programs: memory, offloading and rounds."""

import re

import jax
import jax.numpy as jnp
import pytest
from described_machines import described, needs_cuda_plugin, needs_libtpu
from jax.sharding import PartitionSpec as P

from partitioning import CHIPS, MeshConfig, PjitPartitioner
from partitioning.hardware import default_options, option_values
from partitioning.hardware.compilers import OutOfMemoryError
from partitioning.products import find_rounds, scatter_sum
from partitioning.state.boxes import unbox
from train.models.remat import Remat
from train.models.transformer import Transformer, TransformerConfig


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


@pytest.mark.long
@needs_libtpu
def test_the_inputs_of_layers_lie_in_the_memory_of_the_host():
    config = TransformerConfig(
        vocab_size=256,
        num_layers=4,
        embed_dim=256,
        num_heads=2,
        num_kv_heads=2,
        head_dim=128,
        mlp_dim=512,
        dtype='bfloat16',
        remat=Remat(offload=['residual']),
    )
    net, tokens_BL = Transformer(config), jax.ShapeDtypeStruct((16, 128), jnp.int32)
    mesh = MeshConfig(axes={'data': 4, 'model': 1}, devices=described('v5p:2x2x1').devices)
    partitioner = PjitPartitioner(mesh=mesh)
    plan = partitioner.plan(lambda key, x: net.init(key, x), jax.random.key(0), tokens_BL)

    def gradients(params, tokens_BL):
        return jax.grad(lambda p: net.apply(p, tokens_BL).sum())(params)

    rows = partitioner.data_partition_spec
    step = partitioner.partition(gradients, (plan.specs, rows), plan.specs)
    text = step.lower(unbox(plan.abstract_state), tokens_BL).compile().as_text()
    # The memory of the host is memory space 5. A device has the inputs of 4 layers, for 4 rows.
    assert re.search(r'bf16\[4,4,128,256\]\{\S*S\(5\)\}', text)


@needs_libtpu
@pytest.mark.parametrize(
    ('name', 'slices', 'axes', 'expected'),
    [
        ('v5p:4x4x4', 1, {'data': 64, 'model': 1}, {'data': (16, 4)}),
        ('v5p:4x4x4', 1, {'data': 16, 'model': 4}, {}),
        ('v5p:8x8x8', 1, {'data': 512}, {'data': (64, 8)}),
        ('v5e:4x4', 1, {'data': 1, 'model': 16}, {'model': (4, 4)}),
        ('v6e:16x16', 1, {'data': 256}, {'data': (16, 16)}),
        ('v6e:16x16', 1, {'data': 32, 'model': 8}, {}),
        ('v5e:4x4', 2, {'replica': 1, 'data': 16}, {'data': (4, 4)}),
    ],
)
def test_rounds_of_an_axis_that_spans_a_slice(name, slices, axes, expected):
    topology = described(name, slices)
    mesh = MeshConfig(axes=axes, slice_axis='replica', devices=topology.devices).build()
    assert find_rounds(mesh) == expected


@needs_libtpu
def test_the_compiler_keeps_the_reduce_scatters():
    """In one round it would be an all-reduce of the whole array."""
    mesh = MeshConfig(axes={'data': 16}, devices=described('v5e:4x4').devices).build()
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=[('batch', 'data')])

    def scatter(x_NDF):
        return jax.shard_map(
            lambda x_NDF: scatter_sum(x_NDF[0], 'data', 0),
            in_specs=P('data'),
            out_specs=P('data'),
        )(x_NDF)

    step = partitioner.partition(scatter, P('data'), P('data'))
    x_NDF = jax.ShapeDtypeStruct((16, 4096, 14336), jnp.bfloat16)
    text = step.lower(x_NDF).compile().as_text()
    assert re.findall(r'= (\S+?)\{\S* reduce-scatter\(', text) == [
        'bf16[1024,14336]',
        'bf16[256,14336]',
    ]
    assert ' all-reduce(' not in text
