"""Runs on described machines: their settings are moved there, without data."""

import pytest
from small import model, small_config

from partitioning import MeshConfig, PjitPartitioner
from partitioning.hardware import stand_in_devices
from train.data import CausalLM, TextFiles
from train.errors import ConfigError
from train.objectives import NextToken
from train.planning.forecasts import plan_step
from train.planning.machines import Machine, move_to, parse_machine, stand_in

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    'name, machine',
    [
        ('v5p:4x4x4', Machine('v5p:4x4x4')),
        ('2xv5e:16x16', Machine('v5e:16x16', 2)),
        ('12xh100:2x8', Machine('h100:2x8', 12)),
    ],
)
def test_machines_by_name(name, machine):
    assert parse_machine(name) == machine
    assert str(machine) == name


def config_of(tmp_path, partitioner, **changes):
    """A run of the small model whose data does not exist."""
    task = CausalLM(source=TextFiles(pattern='there/is/no/such/file'))
    net = model(vocab_size=512, embed_dim=128, num_heads=16, num_kv_heads=16)
    settings = {'task': task, 'objective': NextToken(model=net), 'partitioner': partitioner}
    return small_config(tmp_path / 'run', tmp_path, **settings | {'batch_size': 128} | changes)


@pytest.mark.parametrize(
    'mesh, machine, sizes',
    [
        ({'num_partitions': 2}, Machine('v5e:4x4'), {'data': 8, 'model': 2}),
        ({'num_partitions': 8}, Machine('v5e:4x4', 2), {'replica': 2, 'data': 2, 'model': 8}),
        (
            {'mesh': MeshConfig(axes={'data': -1, 'model': 4}, slice_axis='replica')},
            Machine('v5p:4x4x4'),
            {'data': 16, 'model': 4},
        ),
        (
            {'mesh': MeshConfig(axes={'data': -1, 'model': 4}, topology='v5e:4x4')},
            Machine('v5p:2x2x2'),
            {'data': 2, 'model': 4},
        ),
    ],
)
def test_the_mesh_of_a_run_is_moved_to_the_machine(tmp_path, mesh, machine, sizes):
    there = move_to(config_of(tmp_path, PjitPartitioner(**mesh)), machine)
    assert dict(there.partitioner.mesh.shape) == sizes
    assert there.evaluators == {}
    step = plan_step(there)
    assert step.run.batch['decoder_input_tokens'].shape == (128, 16)
    # Each device of a data axis has its share of the rows, int32 or float32.
    rows = step.run.batch['decoder_loss_weights']
    num_data = sizes['data'] * sizes.get('replica', 1)
    assert rows.sharding.shard_shape(rows.shape) == (128 // num_data, 16)


def test_a_run_is_checked_against_the_machine_and_not_against_this_computer(tmp_path):
    """16 partitions do not divide the 8 devices here, and a batch of 8 not the data axis there."""
    with stand_in(Machine('v5e:4x4')):
        config = config_of(tmp_path, PjitPartitioner(num_partitions=16))
    assert dict(config.partitioner.mesh.shape) == {'data': 1, 'model': 16}
    with stand_in(Machine('v5e:4x4')), pytest.raises(ValueError, match='16'):
        config_of(tmp_path, PjitPartitioner(num_partitions=1), batch_size=8)
    with pytest.raises(ValueError, match='8'):
        config_of(tmp_path, PjitPartitioner(num_partitions=16))


def test_a_mesh_whose_sizes_do_not_fit_the_machine_is_refused(tmp_path):
    config = config_of(tmp_path, PjitPartitioner(mesh=MeshConfig(axes={'data': 4, 'model': 2})))
    with pytest.raises(ValueError, match=r'product 8, .* devices is 16'):
        move_to(config, Machine('v5e:4x4'))
    with pytest.raises(ValueError, match=r'32'):
        plan_step(move_to(config_of(tmp_path, PjitPartitioner(32)), Machine('v5e:8x8')))


def test_a_vocabulary_that_is_too_small_is_found_without_data(tmp_path):
    small = NextToken(model=model(vocab_size=200))
    with pytest.raises(ConfigError, match=r'vocab_size 200 .* 257 tokens'):
        plan_step(config_of(tmp_path, PjitPartitioner(num_partitions=1), objective=small))


def test_a_machine_without_its_compiler(monkeypatch):
    from partitioning.hardware import topology

    def refuse(*args, **kwargs):
        raise RuntimeError('JAX TPU support not installed')

    monkeypatch.setattr(topology, '_devices', refuse)
    says = r"v5e:4x4: .*libtpu: pip install 'meshwright\[aot\]'"
    with pytest.raises(ConfigError, match=says), stand_in(Machine('v5e:4x4')):
        raise AssertionError


def test_stand_ins_end_with_their_context():
    here = MeshConfig(axes={'data': -1})
    with stand_in_devices(here.build().devices.flat[:4]):
        assert here.build().size == 4
    assert here.build().size == 8
