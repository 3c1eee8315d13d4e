"""20 GB of parameters are planned and audited for another machine, with little memory.

It happens in a separate process, whose peak memory the kernel reports.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.core

MB = 2**20
MOST = 200 * MB
EMBED, MLP, VOCAB, LAYERS = 3072, 12288, 32000, 48
# By hand, over data 2 x model 4: the rules shard 'vocab', 'joined_kv' and 'mlp' over 'model', and
# 'embed' over 'data', so every matrix is in 8 shards and every scale in 2.
LAYER = 4 * EMBED * EMBED + 2 * EMBED * MLP
PARAMETERS = VOCAB * EMBED + LAYERS * (LAYER + EMBED)
HELD = 4 * (VOCAB * EMBED // 8 + LAYERS * (LAYER // 8 + EMBED // 2))
OF_OPTIMIZER = 2 * HELD + 4  # two moments, and an int32 count
PER_DEVICE = HELD + OF_OPTIMIZER + 4  # and an int32 step

CHILD = f"""
import json
import jax, jax.numpy as jnp, flax.linen as nn, numpy as np, optax
from partitioning import MeshConfig, PjitPartitioner, TrainState
from partitioning import standard_logical_axis_rules
from mock_devices import tpus


def peak():
    # resource.getrusage would start with the peak of the parent process.
    with open('/proc/self/status') as status:
        (line,) = [line for line in status if line.startswith('VmHWM')]
    return 1024 * int(line.split()[1])


def box(shape, *names):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def layer():
    return {{
        **{{k: box(({EMBED}, {EMBED}), 'embed', 'joined_kv') for k in ('query', 'key', 'value')}},
        'out': box(({EMBED}, {EMBED}), 'joined_kv', 'embed'),
        'wi': box(({EMBED}, {MLP}), 'embed', 'mlp'),
        'wo': box(({MLP}, {EMBED}), 'mlp', 'embed'),
        'scale': box(({EMBED},), 'embed'),
    }}


imported = peak()
params = {{'table': box(({VOCAB}, {EMBED}), 'vocab', 'embed')}}
params |= {{f'layers_{{i}}': layer() for i in range({LAYERS})}}
state = jax.eval_shape(lambda p: TrainState.create(p, optax.adamw(1e-3)), params)
devices = tpus((2, 2, 2), 'TPU v4')
rules = standard_logical_axis_rules(1, 2)
mesh = MeshConfig.from_t5x(num_partitions=4, devices=devices)
plan = PjitPartitioner(mesh=mesh, logical_axis_rules=rules).plan(state)
audit = plan.audit()
str(audit)
audited = peak()
live = sum(x.nbytes for x in jax.live_arrays())
np.ones({2 * MOST} // 8)
held = sorted(set(audit.bytes_by_device.values()))
print(json.dumps(dict(audit.as_dict(), imported=imported, audited=audited,
    allocated=peak(), live=live, held=held, devices=len(audit.bytes_by_device))))
"""


@pytest.mark.long
def test_an_audit_of_a_big_model_is_right_and_needs_little_memory():
    """The meter works: it sees what is allocated at the end."""
    if not pathlib.Path('/proc/self/status').exists():
        pytest.skip('no /proc, which says the peak memory of a process')
    here = pathlib.Path(__file__).parent
    run = subprocess.run(
        [sys.executable, '-c', CHILD],
        capture_output=True,
        text=True,
        cwd=here.parents[1],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': f'{here.parents[1]}:{here}'},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report['live'] == 0  # bytes of arrays
    assert report['audited'] - report['imported'] < MOST
    assert report['allocated'] - report['audited'] > MOST
    assert report['bytes_total'] == 3 * 4 * PARAMETERS + 8
    assert report['by_role'] == {'parameters': HELD, 'optimizer': OF_OPTIMIZER, 'other': 4}
    assert (report['devices'], report['held']) == (8, [PER_DEVICE])
    # Only scales are replicated: they are in 2 shards instead of 8.
    extra = 3 * LAYERS * 4 * (EMBED // 2 - EMBED // 8)
    assert report['replicated_bytes_per_device'] == extra
    assert len([row for row in report['rows'] if row['reason']]) == 3 * LAYERS
