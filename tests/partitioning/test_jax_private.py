"""The private names of jax that `partitioning.hardware.jax_private` depends on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as kernels

from partitioning.hardware.jax_private import described_cudnn, num_cached, this_process

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def attend(x):
    return jax.nn.dot_product_attention(x, x, x, implementation='cudnn')


def test_described_gpus_have_cudnn(monkeypatch):
    """jax asks this machine for its cuDNN, and only programs for described GPUs are not asked."""
    asked = []
    monkeypatch.setattr(kernels, 'check_cudnn_version', lambda: asked.append(1) or 91300)
    for kind, rows, expected in (('NVIDIA H100 80GB HBM3', 2, 0), ('cpu', 4, 1)):
        heads = jax.ShapeDtypeStruct((rows, 128, 4, 64), jnp.bfloat16)  # jax keeps what it traced
        mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
        with described_cudnn(mesh):
            assert 'dot_product_attention' in str(jax.make_jaxpr(attend)(heads))
        assert len(asked) == expected, kind


def test_the_process_of_a_test_counts(monkeypatch):
    assert this_process() == jax.process_index() == 0
    monkeypatch.setattr(xla_bridge, 'process_index', lambda *_: 3)
    assert this_process() == 3


def test_the_programs_of_a_function_are_counted():
    add = jax.jit(lambda x: x + 1)
    sizes = [num_cached(add)]
    for x in (jnp.ones(2), jnp.zeros(2), jnp.ones(3)):
        add(x)
        sizes.append(num_cached(add))
    assert sizes == [0, 1, 1, 2]
