"""Attention is computed by the kernels of the machine that a program is lowered for."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from described_machines import needs_cuda_plugin, needs_libtpu
from jax.sharding import PartitionSpec as P

from partitioning import PjitPartitioner, describe_topology
from partitioning.mesh import MeshConfig
from train.attention import AttentionSettings, Sight, attend

RULES = [('batch', 'data'), ('heads', 'model'), ('kv_heads', 'model')]
RULES += [('length', None), ('kv', None)]
LENGTH = 512


def lowered_text(machine, dtype='bfloat16', window=None, soft_cap=None, segmented=False):
    """The program of the gradients of attention on a described machine of four devices or more."""
    devices = describe_topology(machine).devices
    mesh = MeshConfig(axes={'data': len(devices) // 2, 'model': 2}, devices=devices)

    def loss(q, k, v, segments, local):
        sight = Sight(window=window, local=local, segments_BL=segments if segmented else None)
        sight = dataclasses.replace(sight, scale=0.1, soft_cap=soft_cap)
        attended = attend(q, k, v, sight=sight, settings=AttentionSettings())
        return jnp.sum(attended.astype(jnp.float32))

    q, k = (jax.ShapeDtypeStruct((8, LENGTH, heads, 64), dtype) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((8, LENGTH), jnp.int32)
    step = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES).partition(
        jax.grad(loss, argnums=(0, 1, 2)), (*[P('data')] * 4, None), None
    )
    return step.lower(q, k, k, segments, jax.ShapeDtypeStruct((), bool)).as_text()


@needs_libtpu
def test_tpus_use_splash_kernels():
    text = lowered_text('v5e:2x2', window=100, soft_cap=20.0, segmented=True)
    kernels = re.findall(r'kernel_name = "(splash_mha_\w+)"', text)
    # Forward and backward kernels are there for layers with a window and for layers without.
    assert len(kernels) == 4 and len(set(kernels)) == 2, kernels
    assert f'{LENGTH}x{LENGTH}x' not in text


@needs_cuda_plugin
@pytest.mark.parametrize(
    'settings, kernels',
    [
        ({}, ['fmhaSoftmax', 'fmhaSoftmaxBackward']),
        ({'segmented': True}, ['fmhaScaleBiasSoftmax', 'fmhaScaleBiasSoftmaxBackward']),
        ({'soft_cap': 20.0}, []),
        ({'dtype': 'float32'}, []),
    ],
    ids=str,
)
def test_gpus_use_cudnn_where_it_has_what_is_needed(settings, kernels):
    """No cuDNN is installed here: described GPUs have it."""
    text = lowered_text('h100:1x8', **settings)
    assert set(re.findall(r'__cudnn\$(\w+)', text)) == set(kernels)
    if not kernels:
        assert 'while' in text and f'{LENGTH}x{LENGTH}x' not in text, 'not blockwise'


@needs_cuda_plugin
def test_functions_of_users_may_ask_for_the_cudnn_of_described_gpus():
    """The function of jax that knows the version of cuDNN is as before afterwards."""
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')

    ask = kernels.check_cudnn_version
    mesh = MeshConfig(axes={'data': 8}, topology='h100:1x8')
    step = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES).partition(
        jax.shard_map(attend, mesh=mesh.build(), in_specs=P('data'), out_specs=P('data')),
        (P('data'),) * 3,
        P('data'),
    )
    q, k = (jax.ShapeDtypeStruct((8, LENGTH, heads, 64), 'bfloat16') for heads in (4, 2))
    assert '__cudnn$fmhaSoftmax' in step.lower(q, k, k).as_text()
    assert kernels.check_cudnn_version is ask
