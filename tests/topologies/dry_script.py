"""A training script as its users write it, for any number of devices and processes."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

WIDTH, HIDDEN, ROWS = 256, 512, 64


def make_mesh(devices):
    return jax.make_mesh(
        (len(devices) // 4, 4), ('data', 'model'), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def shardings(mesh):
    return {
        'up': NamedSharding(mesh, PartitionSpec('data', 'model')),
        'down': NamedSharding(mesh, PartitionSpec('model', 'data')),
    }


def init(key):
    up, down = jax.random.split(key)
    return {
        'up': jax.random.normal(up, (WIDTH, HIDDEN)),
        'down': jax.random.normal(down, (HIDDEN, WIDTH)),
    }


def train_step(params, x):
    def loss(params):
        return ((jax.nn.relu(x @ params['up']) @ params['down'] - x) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def main():
    jax.distributed.initialize()
    mesh = make_mesh(jax.devices())
    rows = NamedSharding(mesh, PartitionSpec('data'))
    params = jax.jit(init, out_shardings=shardings(mesh))(jax.random.key(0))
    step = jax.jit(train_step, donate_argnums=0)
    shard = params['up'].addressable_shards[0].data.shape
    print(f'process {jax.process_index()} of {jax.process_count()}, shards of {shard}')
    print(len(params['up'].addressable_shards), 'of', jax.device_count(), 'shards are here')
    os.makedirs('runs', exist_ok=True)
    rng = np.random.default_rng(0)
    with open('runs/log.jsonl', 'w') as log:
        for number in range(1_000_000):
            local = rng.normal(size=(ROWS // jax.process_count(), WIDTH)).astype(np.float32)
            x = jax.make_array_from_process_local_data(rows, local)
            old = params
            params, value = step(params, x)
            assert old['up'].is_deleted() and not params['up'].is_deleted()
            log.write(json.dumps({'loss': float(value)}) + '\n')
            log.flush()
            multihost_utils.sync_global_devices(f'step {number}')
            lines = len(Path('runs/log.jsonl').read_text().splitlines())
            print(f'{x.shape}: loss {value:.2f}, {lines} lines')
            if '--fail' in sys.argv:
                raise KeyError('no such dataset')


if __name__ == '__main__':
    main()
