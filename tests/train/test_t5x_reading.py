"""Reading of checkpoints that T5X wrote, against the sums that it computed."""

import json

import jax
import numpy as np
import pytest
import t5x_reference
from flax import serialization
from small import partitioner

from train.checkpoints.arrays.placing import read_all
from train.checkpoints.formats.t5x_files import read_arrays
from train.errors import ConfigError


def sums(array):
    values = array.read().astype(np.float64)
    return [list(array.shape), str(array.dtype), values.sum(), (values**2).sum()]


@pytest.mark.parametrize(
    'name', ['t5_1_1-orbax-10', 'decoder_only-orbax-10', 'decoder_only-legacy-10']
)
def test_every_array_of_a_checkpoint_has_the_sums_that_t5x_computed(name):
    facts = t5x_reference.facts(name.split('-')[0])
    run = facts['train'][facts['checkpoint_step10_run']]
    expected = {f'target/{k}': v for k, v in run['params_after'].items()}
    expected |= {f'state/param_states/{k}': v for k, v in run['state_after'].items()}
    arrays = read_arrays(t5x_reference.checkpoint(name))
    assert arrays.pop('state/step').read() == 10
    placeholders = {k for k, v in arrays.items() if k.endswith('/m') and not v.read().any()}
    assert arrays.keys() - placeholders == expected.keys() - placeholders
    for key, values in expected.items():
        assert sums(arrays[key])[:2] == values[:2], key
        np.testing.assert_allclose(sums(arrays[key])[2:], values[2:], 1e-6, 1e-6, err_msg=key)


def test_bfloat16_is_the_rounded_float32():
    exact = read_arrays(t5x_reference.checkpoint('t5_1_1-orbax-10'))
    rounded = read_arrays(t5x_reference.checkpoint('t5_1_1-legacy_bfloat16-10'))
    assert exact.keys() == rounded.keys()
    for name, array in rounded.items():
        dtype = 'bfloat16' if name.startswith('target/') else exact[name].dtype
        assert array.dtype == dtype
        np.testing.assert_array_equal(array.read(), exact[name].read().astype(dtype))


def test_an_old_checkpoint_is_one_file_and_stores_bfloat16_as_uint16(tmp_path):
    one_and_a_half = np.array([[0x3F80, 0x3FC0]], np.uint16)  # 1.0 and 1.5 in bfloat16
    target = {'dense': {'kernel': one_and_a_half}}
    content = {'version': 2, 'optimizer': {'target': target, 'state': {'step': np.int32(7)}}}
    file = tmp_path / 'old.checkpoint_7'
    file.write_bytes(serialization.msgpack_serialize(content))
    arrays = read_arrays(file)
    assert arrays['state/step'].read() == 7
    kernel = arrays['target/dense/kernel']
    assert (kernel.shape, str(kernel.dtype)) == ((1, 2), 'bfloat16')
    assert kernel.read((slice(0, 1), slice(1, 2))).tolist() == [[1.5]]
    file.write_bytes(serialization.msgpack_serialize(content | {'version': 1}))
    with pytest.raises(ConfigError, match='version 1: only 2 and 3'):
        read_arrays(file)
    file.write_bytes(b'\xc1')
    with pytest.raises(ConfigError, match='damaged'):
        read_arrays(file)


@pytest.mark.parametrize('kind', ['orbax', 'legacy'])
def test_devices_read_only_their_shards(kind):
    """Files of chunks that no device asks for are not opened: they may be missing."""
    arrays = read_arrays(t5x_reference.checkpoint(f'decoder_only-{kind}-10'))
    array = arrays['target/decoder/layers_0/mlp/wo/kernel']
    read = []
    counted = type(array)(
        shape=array.shape, dtype=array.dtype, start=lambda i: read.append(i) or array.start(i)
    )
    mesh = partitioner(4, 2).mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, 'model'))
    struct = jax.ShapeDtypeStruct(array.shape, np.float32, sharding=sharding)
    placed = read_all({'x': counted}, {'x': struct})['x']
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, array.read())
    half = array.shape[1] // 2
    assert sorted(i[1].indices(array.shape[1])[:2] for i in read) == [(0, half), (half, 2 * half)]


def test_damage_is_named_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r'is not a T5X checkpoint \(expected'):
        read_arrays(tmp_path)
    (tmp_path / 'state').mkdir()
    metadata = {'tree_metadata': {"('target', 'x')": {}}, 'use_ocdbt': True, 'use_zarr3': False}
    (tmp_path / 'state/_METADATA').write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match=r'the T5X checkpoint \S+ is damaged \(.*') as error:
        read_arrays(tmp_path)
    assert '\n' not in str(error.value)
