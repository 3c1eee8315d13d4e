"""What a described TPU keeps in the memory of its host."""

import re

import jax
import jax.numpy as jnp
from described_machines import described, needs_libtpu

from partitioning import MeshConfig, PjitPartitioner
from partitioning.state.boxes import unbox
from train.models.remat import Remat
from train.models.transformer import Transformer, TransformerConfig


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
