"""Models that do not fit are refused with the bytes, and with a mesh on which they fit."""

import os
import platform
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from partitioning import MeshConfig, Partitioned, PjitPartitioner
from partitioning.hardware import CHIPS
from partitioning.hardware.compilers import (
    OutOfMemoryError,
    explain_compiler_error,
    needed_memory,
)
from train.errors import ConfigError
from train.machine.host_memory import release_freed_memory
from train.reporting import memory
from train.reporting.memory import check_fits

KEY = jax.random.key(0)
SIZE = 64 * 1024 * 4  # the bytes of the kernel


def linen_init(key):
    kernel = nn.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    return nn.Dense(1024, use_bias=False, kernel_init=kernel).init(key, jnp.ones((1, 64)))


def nnx_init(key):
    names = {'out_sharding': ('embed', 'mlp')}
    rngs = nnx.Rngs(params=key)
    return nnx.state(nnx.Linear(64, 1024, use_bias=False, rngs=rngs, kernel_metadata=names))


def refusal(partitioner, limit, init=linen_init, step=None):
    plan = partitioner.plan(init, KEY)
    with pytest.raises(ConfigError) as caught:
        check_fits(plan, partitioner, step, limit=limit)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize('init', [linen_init, nnx_init])
def test_the_nearest_mesh_of_the_same_devices(init):
    # The rules shard 'mlp' over the model axis, and 'embed' over none.
    message = refusal(PjitPartitioner(2), SIZE // 4, init)
    assert 'the state needs 131.1 kB per device on the mesh data 4 x model 2' in message
    assert 'a device has 65.5 kB' in message
    assert 'use the mesh data 2 x model 4, where a device holds 65.5 kB' in message


def test_a_state_that_fits():
    partitioner = PjitPartitioner(2)
    plan = partitioner.plan(linen_init, KEY)
    check_fits(plan, partitioner, limit=SIZE // 2)
    check_fits(plan, partitioner)  # in the memory of this host


def test_sizes_that_a_mesh_does_not_divide_are_not_offered():
    def init(key):
        return {'kernel': Partitioned(jnp.ones((1024, 12)), ('embed', 'mlp'))}

    # A model axis of 8 would do, but does not divide 12; layout='fsdp' shards the 1,024.
    message = refusal(PjitPartitioner(2), 1024 * 12 * 4 // 8, init)
    assert "use the mesh data 4 x model 2 and layout='fsdp', where a device holds 6.1 kB" in message


def test_more_devices():
    message = refusal(PjitPartitioner(2), SIZE // 8 - 1)
    assert 'use 16 devices as data 1 x model 16, where a device holds 16.4 kB' in message
    assert refusal(PjitPartitioner(2), 10).endswith(': use a smaller model')


def test_a_replicated_state_is_offered_fsdp():
    message = refusal(PjitPartitioner(layout='data_parallel'), SIZE // 8)
    assert "use the mesh data 8 x model 1 and layout='fsdp', where a device holds 32.8" in message


def test_slices_are_kept():
    mesh = MeshConfig(axes={'replica': 2, 'data': 4, 'model': 1})
    message = refusal(PjitPartitioner(mesh=mesh), SIZE // 4)
    assert 'use the mesh replica 2 x data 1 x model 4' in message


def test_a_step_that_does_not_fit():
    partitioner = PjitPartitioner(2)

    def step(state, x):
        return state, jnp.sort(x * 2.0).sum()  # the sorted array is temporary

    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    plan = partitioner.plan(linen_init, KEY)
    compiled = partitioner.compile(
        partitioner.partition(step, (plan.specs, None), (plan.specs, None), donate_argnums=0),
        plan.abstract_state,
        x,
    )
    needed = needed_memory(compiled, partitioner.mesh)
    assert needed >= SIZE // 2 + 2 * 4 * 2**20  # the state, x and the sorted array
    message = refusal(partitioner, needed - SIZE // 4, step=compiled)
    assert 'the train step needs' in message and '131.1 kB of them for the state' in message
    assert 'raise num_microbatches, or use the mesh data 2 x model 4' in message
    check_fits(plan, partitioner, compiled, limit=needed)


def test_the_compiler_of_tpus_finds_that_a_step_does_not_fit():
    """libtpu 0.0.52 wrote the text."""
    text = (
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory '
        'required for HLO temporaries (40.25G) exceeds available HBM (15.75G). HLO module: jit_f.'
    )
    partitioner = PjitPartitioner(2)
    plan = partitioner.plan(linen_init, KEY)
    error = explain_compiler_error(RuntimeError(text), 'step', partitioner.mesh)
    assert isinstance(error, OutOfMemoryError)
    assert (error.needed, error.available) == (40.25 * 2**30, 15.75 * 2**30)
    assert 'step needs 40.25 GiB' in str(error) and '15.75 GiB: use more devices' in str(error)
    with pytest.raises(ConfigError) as caught, memory.memory_advice(plan, partitioner):
        raise error
    assert 'the train step needs 40.25 GiB' in str(caught.value)
    assert 'a device has 15.75 GiB: raise num_microbatches, or use' in str(caught.value)


def test_virtual_devices_share_the_memory_of_the_host(monkeypatch):
    assert 0 < memory._host_memory() <= os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    monkeypatch.setattr(memory, '_host_memory', lambda: 8000)
    assert memory.device_memory(jax.devices()[0]) == 1000


def test_described_devices_have_the_memory_of_their_chip():
    pytest.importorskip('libtpu', reason='describing TPUs needs libtpu')
    partitioner = PjitPartitioner(mesh=MeshConfig(axes={'data': 4}, topology='v5e:2x2'))
    [device, *_] = partitioner.mesh.devices.flat
    assert memory.device_memory(device) == CHIPS['v5e'].hbm_bytes
    layer = {'w': jax.ShapeDtypeStruct((2**16, 2**18), jnp.float32)}  # 64 GiB
    partitioner = PjitPartitioner(mesh=partitioner.mesh, layout='fsdp')
    plan = partitioner.plan(lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape), layer), KEY)
    with pytest.raises(ConfigError, match=r'needs 16\.00 GiB .* has 15\.75 GiB: use 8 devices'):
        check_fits(plan, partitioner)


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='malloc_trim is of glibc')
def test_freed_memory_goes_back_to_the_system():
    def resident() -> int:
        pages = Path('/proc/self/statm').read_text().split()[1]
        return int(pages) * os.sysconf('SC_PAGE_SIZE')

    pieces = [bytes(4000) for _ in range(50_000)]  # 200 MB
    kept = pieces[::1000]  # so that what is freed lies between pieces that are in use
    del pieces
    before = resident()
    release_freed_memory()
    assert before - resident() > 100e6
    assert len(kept) == 50
