"""The flows that CONTRIBUTING.md lists are those that small programs take."""

import collections
import contextlib
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import LogicallyPartitioned, MeshConfig, PjitPartitioner, Plan
from partitioning.layout.ownership import shard_ownership
from train import Supervised, TrainConfig, train
from train.data import Examples, Feed, LocalBatches, Prefetch

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / 'CONTRIBUTING.md').read_text()
pytestmark = pytest.mark.smoke  # The flows pass through most rooms.
MESH = MeshConfig(axes={'data': 4, 'model': 2})


def flow(title):
    """The functions of the list with this title, as (file, qualified name)."""
    section = TEXT.partition(f'### {title}\n')[2].partition('\n#')[0]
    return re.findall(r'^\d\. `([\w/]+\.py)`: `([\w.]+)`', section, re.M)


@contextlib.contextmanager
def recorded_calls():
    """Records the calls of functions of this repository in this thread, in their order."""
    calls = []

    def profile(frame, event, _):
        if event == 'call':
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        prefix = f'{ROOT}/'
        inside = [(file.removeprefix(prefix), name) for file, name in calls if prefix in file]
        calls[:] = [call for call in inside if call[0].startswith(('partitioning/', 'train/'))]


def assert_visited_once_in_order(listed, calls):
    times = collections.Counter(calls)
    assert {name: times[file, name] for file, name in listed} == {name: 1 for _, name in listed}
    assert sorted(listed, key=calls.index) == listed


def init(key):
    kernel = jax.random.normal(key, (16, 32))
    return {'kernel': LogicallyPartitioned(kernel, ('embed', 'mlp'))}


def make_partitioner(**settings):
    partitioner = PjitPartitioner(mesh=MESH, **settings)
    assert partitioner.mesh.size == 8  # Meshes are made before the recording.
    return partitioner


def test_every_list_is_short():
    titles = re.findall(r'^### (From .*)$', TEXT, re.M)
    assert len(titles) == 4
    for title in titles:
        assert 5 <= len(flow(title)) <= 8


def test_a_logical_axis_becomes_a_named_sharding():
    partitioner = make_partitioner(logical_axis_rules=[('embed', 'data'), ('mlp', 'model')])
    with recorded_calls() as calls:
        shardings = partitioner.plan(init, jax.random.key(0)).shardings
    assert shardings['kernel'].spec == P('data', 'model')
    assert_visited_once_in_order(flow('From a logical axis to a NamedSharding'), calls)


def test_rows_become_a_global_array():
    partitioner = make_partitioner(logical_axis_rules=[('batch', 'data')])
    rows = [{'x': np.full(2, n)} for n in range(8)]
    shard_ownership.cache_clear()
    with recorded_calls() as calls:
        layout = partitioner.get_data_layout(8)
        local = LocalBatches(rows, layout.batch_size, layout.row_indices)
        with contextlib.closing(Feed(local, partitioner, prefetch=Prefetch(workers=0))) as feed:
            batch = next(feed)
    np.testing.assert_array_equal(batch['x'], [[n, n] for n in range(8)])
    assert_visited_once_in_order(flow('From the data layout to a global array'), calls)


def test_a_configuration_becomes_a_training_run(tmp_path):
    partitioner = make_partitioner(layout='data_parallel')
    config = TrainConfig(
        model_dir=str(tmp_path),
        objective=Supervised(model=nn.Dense(1), inputs='x', row_loss=lambda y, batch: y[:, 0] ** 2),
        partitioner=partitioner,
        optimizer=optax.sgd(0.1),
        task=Examples(training={'x': np.ones((16, 4), np.float32)}),
        total_steps=1,
        batch_size=8,
    )
    with recorded_calls() as calls:
        state = train(config)
    assert int(state.step) == 1
    assert_visited_once_in_order(flow('From a configuration to a training run'), calls)


def test_a_plan_file_becomes_a_partitioned_state(tmp_path):
    rules = [('embed', 'data'), ('mlp', 'model')]
    key = jax.random.key(0)
    make_partitioner(logical_axis_rules=rules).plan(init, key).save(tmp_path / 'plan.json')
    with recorded_calls() as calls:
        partitioner = make_partitioner(layout=Plan.load(tmp_path / 'plan.json'))
        state = partitioner.plan(init, key).init(key)
    assert state['kernel'].sharding.spec == P('data', 'model')
    assert jnp.isfinite(state['kernel']).all()
    assert_visited_once_in_order(flow('From a plan file to a partitioned state'), calls)


def test_the_rooms_exist():
    table = TEXT.partition('## The house')[2].partition('##')[0]
    rooms = re.findall(r'\| `([\w/.]+)` \|', table)
    assert len(rooms) >= 10
    for room in rooms:
        assert (ROOT / room).exists(), room
    for package in ('partitioning', 'meshwright', 'train'):
        folders = {p.parent for p in (ROOT / package).glob('*/__init__.py')}
        assert folders <= {ROOT / room for room in rooms}, package
